package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// order is the request into which a form is converted: to the rack's API, or to the admin listener.
type order struct {
	method, path string
	ofAPI        bool
	body         any
	// done tells the user what was done.
	done string
}

// preset is a common fault that the form offers.
type preset struct {
	Name, Explanation string
	fault             adminapi.Fault
}

var presets = []preset{
	{"refuse", "the rack answers 503 and does nothing", adminapi.Fault{Phase: adminapi.Instead,
		Response: &adminapi.Response{Status: http.StatusServiceUnavailable,
			ErrorCode: "ServiceNotAvailable", Message: "armed on the console"}}},
	{"lose", "the rack does it, and the answer is lost", adminapi.Fault{Phase: adminapi.After,
		Cut: true}},
	{"slow", "the rack waits for five seconds, and then does it",
		adminapi.Fault{Phase: adminapi.Before, Delay: adminapi.Duration(5 * time.Second)}},
	{"hang", "the rack does nothing, and does not answer for a minute",
		adminapi.Fault{Phase: adminapi.Instead, Hang: adminapi.Duration(time.Minute)}},
	{"unwind", "the rack begins, fails, and undoes it", adminapi.Fault{Phase: adminapi.Unwind}},
	{"never", "the disk is attached, and its device never appears",
		adminapi.Fault{Device: &adminapi.DeviceFault{Never: true}}},
}

var everyOp = []string{"read", "write", "flush"}

// diskOrders has the faults that the buttons of a disk's page activate.
var diskOrders = map[string]struct {
	fault adminapi.DiskFault
	done  string
}{
	"hang": {adminapi.DiskFault{On: everyOp, Hang: true}, "The disk hangs until it is healed."},
	"fail": {adminapi.DiskFault{On: everyOp}, "Every operation of the disk fails."},
	"slow": {adminapi.DiskFault{On: everyOp, Delay: adminapi.Duration(500 * time.Millisecond)},
		"Every operation of the disk takes half a second longer."},
}

// newOrder reads a form. Its field do has a verb and, after a space, an object.
func newOrder(form url.Values) (order, error) {
	verb, object, _ := strings.Cut(form.Get("do"), " ")
	id := url.PathEscape(object)
	switch verb {
	case "start", "stop":
		return order{method: http.MethodPost, path: "/v1/instances/" + id + "/" + verb, ofAPI: true,
			done: "The instance was told to " + verb + "."}, nil
	case "hang", "fail", "slow":
		o := diskOrders[verb]
		return order{method: http.MethodPost, path: "/disks/" + id + "/faults", body: o.fault,
			done: o.done}, nil
	case "heal":
		return order{method: http.MethodDelete, path: "/disks/" + id + "/faults",
			done: "The disk is healed."}, nil
	case "switch":
		return order{method: http.MethodPatch, path: "/switches", body: json.RawMessage(object),
			done: "The switch is turned."}, nil
	case "set":
		body, err := changedSettings(form)
		return order{method: http.MethodPatch, path: "/switches", body: body,
			done: "The settings are changed."}, err
	case "arm":
		fault, err := newFault(form)
		return order{method: http.MethodPost, path: "/faults", body: fault,
			done: "The fault is armed."}, err
	case "disarm":
		return order{method: http.MethodDelete, path: "/faults/" + id,
			done: "The fault is removed."}, nil
	}
	return order{}, fmt.Errorf("the form asks for %q, which this console does not know", verb)
}

func changedSettings(form url.Values) (map[string]any, error) {
	body := map[string]any{}
	for _, s := range settings(adminapi.Switches{}) {
		switch value := strings.TrimSpace(form.Get(s.Name)); s.Name {
		case "quota_bytes", "disk_limit":
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%s is %q, expected a whole number", s.Name, value)
			}
			body[s.Name] = n
		default:
			body[s.Name] = value
		}
	}
	return body, nil
}

func newFault(form url.Values) (adminapi.Fault, error) {
	times, err := strconv.Atoi(form.Get("times"))
	if err != nil {
		return adminapi.Fault{}, fmt.Errorf("times is %q, expected a number; 0 means always",
			form.Get("times"))
	}
	for _, m := range presets {
		if m.Name == form.Get("what") {
			f := m.fault
			f.Operation, f.Object = form.Get("operation"), strings.TrimSpace(form.Get("object"))
			f.Times = times
			return f, nil
		}
	}
	return adminapi.Fault{}, errors.New("the form does not say what is to happen")
}

// act carries out a form. It answers the script with the outcome as text, and a browser without the
// script with a redirect to the form's page, which then shows the outcome.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	o, err := newOrder(r.PostForm)
	said := o.done
	if err == nil {
		err = c.carryOut(r, o)
	}
	status := http.StatusOK
	if err != nil {
		said, status = "Refused: "+err.Error(), http.StatusBadRequest
	}
	if !strings.Contains(r.Header.Get("Accept"), "text/html") {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		// The caller may be gone.
		_, _ = w.Write([]byte(plain(said)))
		return
	}
	back, err := url.Parse(r.PostForm.Get("back"))
	if err != nil || back.Path != "/" && !strings.HasPrefix(back.Path, "/console/disks/") {
		back = &url.URL{}
	}
	query := back.Query()
	query.Set("said", said)
	// Only the path is taken from the form, so that it leads to no other host.
	http.Redirect(w, r, (&url.URL{Path: "/" + strings.TrimLeft(back.Path, "/"),
		RawQuery: query.Encode()}).String(), http.StatusSeeOther)
}

func (c *Console) carryOut(r *http.Request, o order) error {
	var answer recorder
	if o.ofAPI {
		status, text := c.Run(r.Context(), o.method, o.path)
		answer.status = status
		answer.Write(text)
	} else {
		var body []byte
		if o.body != nil {
			var err error
			if body, err = json.Marshal(o.body); err != nil {
				return fmt.Errorf("the form's value for %s is not JSON: %w", o.path, err)
			}
		}
		own, err := http.NewRequestWithContext(r.Context(), o.method, o.path, bytes.NewReader(body))
		if err != nil {
			return err
		}
		c.Admin.ServeHTTP(&answer, own)
	}
	if answer.status < http.StatusBadRequest {
		return nil
	}
	text := strings.TrimSpace(answer.String())
	var refused struct{ Message string }
	if json.Unmarshal(answer.Bytes(), &refused) == nil && refused.Message != "" {
		text = refused.Message
	}
	return errors.New(text)
}

type recorder struct {
	bytes.Buffer
	header http.Header
	status int
}

func (a *recorder) Header() http.Header {
	if a.header == nil {
		a.header = http.Header{}
	}
	return a.header
}

func (a *recorder) WriteHeader(status int) { a.status = status }
