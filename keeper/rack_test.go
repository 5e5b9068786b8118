package keeper

import (
	"net/http"
	"strings"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

// testRack answers requests about instances and disks. It carries out a request at once, unless it
// is stuck.
type testRack struct {
	w  *fixture
	mu sync.Mutex
	// guarded by mu
	states map[string]string // of the instances, by ID
	fail   map[string]int    // the status to answer "view a", "stop a", "start a" with
	stuck  bool
	// blind is the number of requests for which the token has no role.
	blind int
}

func (r *testRack) set(node, state string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.states[instanceOf(node)] = state
}

// mend removes the faults, so that requests are carried out again.
func (r *testRack) mend() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail, r.stuck, r.blind = map[string]int{}, false, 0
}

func (r *testRack) state(node string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.states[instanceOf(node)]
}

// isBlind reports whether the token has no role for this request.
func (r *testRack) isBlind() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blind--
	return r.blind >= 0
}

// ServeHTTP answers project_view, current_user_view, instance_view, instance_stop and
// instance_start.
func (r *testRack) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Request-Id", "r-1")
	switch path := request.URL.Path; {
	case r.isBlind():
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte(racktest.NotFound.Body))
		return
	case strings.HasPrefix(path, "/v1/projects/"):
		_, _ = w.Write([]byte(racktest.ProjectOf()))
		return
	case path == "/v1/me":
		_, _ = w.Write([]byte(racktest.UserOf(racktest.Numbered(9))))
		return
	}
	id, verb, changes := strings.Cut(strings.TrimPrefix(request.URL.Path, "/v1/instances/"), "/")
	if !changes {
		verb = "view"
	}
	operation := verb
	for letter := 'a'; letter <= 'z'; letter++ {
		if instanceOf(string(letter)) == id {
			operation += " " + string(letter)
		}
	}
	if changes {
		r.w.note(operation)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	answer := r.fail[operation]
	switch {
	case answer != 0:
	case r.states[id] == "":
		answer = http.StatusNotFound
	default:
		answer = http.StatusOK
		if changes {
			answer = http.StatusAccepted
		}
		if changes && !r.stuck {
			r.states[id] = map[string]string{"stop": "stopped", "start": "running"}[verb]
		}
	}
	body := racktest.InstanceOf(r.states[id], racktest.With("id", id))
	switch answer {
	case http.StatusNotFound:
		body = racktest.NotFound.Body
	case http.StatusServiceUnavailable:
		body = racktest.Error(answer, "ServiceUnavailable", "try again").Body
	}
	w.WriteHeader(answer)
	_, _ = w.Write([]byte(body))
}
