package simulator

import (
	"errors"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// A handler turns a request into a call of the rack, and its result into status and body.
type handler = func(*engine.Simulation, *apiRequest) (int, any, error)

type group interface{ ~struct{ *engine.Simulation } }

// answer responds with a status and with what do returns.
func answer[G group, T any](status int, do func(G, *apiRequest) (T, error)) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		body, err := do(G{rack}, r)
		return status, body, err
	}
}

// nothing responds without a body.
func nothing[G group](do func(G, *apiRequest) error) handler {
	return func(rack *engine.Simulation, r *apiRequest) (int, any, error) {
		return http.StatusNoContent, nil, do(G{rack}, r)
	}
}

// listed responds with a page of the list that do returns.
func listed[G group, T named](do func(G, *apiRequest) ([]T, error)) handler {
	return answer(http.StatusOK, func(rack G, r *apiRequest) (page[T], error) {
		items, err := do(rack, r)
		return slice(r.scan, items), err
	})
}

// whole lists objects of the silo. list returns all of them.
func whole[T named](list func(engine.Silo) ([]T, error)) *operation {
	return &operation{list: true,
		serve: listed(func(s engine.Silo, _ *apiRequest) ([]T, error) { return list(s) })}
}

func inSilo[T any](read func(engine.Silo) (T, error)) *operation {
	return &operation{serve: answer(http.StatusOK,
		func(s engine.Silo, _ *apiRequest) (T, error) { return read(s) })}
}

// ofSilo reads something of the silo that the path names.
func ofSilo[T any](read func(engine.Silo, store.Selector) (T, error)) *operation {
	return &operation{serve: answer(http.StatusOK,
		func(s engine.Silo, r *apiRequest) (T, error) { return read(s, r.selector("silo")) })}
}

func listIn[G group, T named](list func(G, *engine.Call, store.Selector, engine.Window) ([]T,
	error)) handler {
	return answer(http.StatusOK, func(rack G, r *apiRequest) (page[T], error) {
		items, err := list(rack, &r.call, r.project(), r.scan.window())
		return newPage(r.scan, items), err
	})
}

// createIn creates an object of the body in a project.
func createIn[G group, B, T any](create func(G, *engine.Call, store.Selector, B) (T,
	error)) handler {
	return answer(http.StatusCreated, func(rack G, r *apiRequest) (T, error) {
		return create(rack, &r.call, r.project(), r.body.(B))
	})
}

// on reads or changes the object that a parameter names.
func on[G group, T any](status int, param string,
	do func(G, *engine.Call, engine.Ref) (T, error)) handler {
	return answer(status, func(rack G, r *apiRequest) (T, error) {
		return do(rack, &r.call, r.ref(param))
	})
}

// viewOf reads an object whose parameter alone names it.
func viewOf[G group, T any](param string,
	view func(G, *engine.Call, store.Selector) (T, error)) handler {
	return answer(http.StatusOK, func(rack G, r *apiRequest) (T, error) {
		return view(rack, &r.call, r.selector(param))
	})
}

// onWith changes the object that a parameter names according to the body.
func onWith[G group, B, T any](status int, param string,
	do func(G, *engine.Call, engine.Ref, B) (T, error)) handler {
	return answer(status, func(rack G, r *apiRequest) (T, error) {
		return do(rack, &r.call, r.ref(param), r.body.(B))
	})
}

// end changes or deletes the object that a parameter names, and responds without a body.
func end[G group](param string, do func(G, *engine.Call, engine.Ref) error) handler {
	return nothing(func(rack G, r *apiRequest) error { return do(rack, &r.call, r.ref(param)) })
}

func listOf[G group, T named](list func(G, *engine.Call, engine.Ref) ([]T, error)) handler {
	return listed(func(rack G, r *apiRequest) ([]T, error) {
		return list(rack, &r.call, r.ref("instance"))
	})
}

func ping(*engine.Simulation, *apiRequest) (int, any, error) {
	return http.StatusOK, map[string]string{"status": "ok"}, nil
}

func projectList(s engine.Silo, r *apiRequest) (page[store.Project], error) {
	items, err := s.Projects(r.scan.window())
	return newPage(r.scan, items), err
}

// imageDemote has the new project in the query, so the image is the silo's or found by its ID.
func imageDemote(s engine.Images, r *apiRequest) (store.Image, error) {
	return s.Demote(&r.call, r.selector("image"), r.project())
}

func importWrite(s engine.Disks, r *apiRequest) error {
	return s.Import(&r.call, r.ref("disk"), r.body.(engine.BulkWrite))
}

func importFinalize(s engine.Disks, r *apiRequest) error {
	return s.Finalize(&r.call, r.ref("disk"), r.body.(string))
}

// serialConsole reads the bytes after an offset from the start, or the most recent ones.
func serialConsole(rack *engine.Simulation, r *apiRequest) (int, any, error) {
	const most = 1 << 20 // more than a rack keeps (16 KiB at each end), and than its clients request
	given := map[string]int64{"max_bytes": most}
	for _, name := range []string{"from_start", "most_recent", "max_bytes"} {
		if r.query.Has(name) {
			n, err := parseNumber(r.query.Get(name), 63)
			if err != nil {
				return 0, nil, err
			}
			given[name] = int64(n)
		}
	}
	from, start := given["from_start"]
	back, recent := given["most_recent"]
	switch {
	case start == recent:
		return 0, nil, badRequest("Exactly one of 'from_start' or 'most_recent' must be specified.")
	case recent:
		from = -1 - back
	}
	text, end, err := engine.Instances{Simulation: rack}.Console(&r.call, r.ref("instance"), from,
		min(given["max_bytes"], most))
	if errors.Is(err, engine.ErrNoConsole) {
		return 0, nil, unimplemented(r.op)
	}
	numbers := make([]int, len(text)) // a []byte would be a string in JSON
	for i, b := range text {
		numbers[i] = int(b)
	}
	return http.StatusOK, struct {
		Data []int `json:"data"`
		End  int64 `json:"last_byte_offset"`
	}{numbers, end}, err
}

func interfaceView(s engine.Instances, r *apiRequest) (store.NetworkInterface, error) {
	return s.Interface(&r.call, r.ref("instance"), r.selector("interface"))
}

func interfaceUpdate(s engine.Instances, r *apiRequest) (store.NetworkInterface, error) {
	return s.UpdateInterface(&r.call, r.ref("instance"), r.selector("interface"),
		r.body.(engine.InterfaceUpdate))
}

func interfaceDelete(s engine.Instances, r *apiRequest) error {
	return s.DeleteInterface(&r.call, r.ref("instance"), r.selector("interface"))
}

func externalIPList(s engine.Instances, r *apiRequest) (page[any], error) {
	ips, err := s.ExternalIPs(&r.call, r.ref("instance"))
	return page[any]{Items: ips}, err
}

// instanceNothing responds with a list that is empty for every instance of this rack.
func instanceNothing(s engine.Instances, r *apiRequest) (page[struct{}], error) {
	_, err := s.View(&r.call, r.ref("instance"))
	return page[struct{}]{Items: []struct{}{}}, err
}
