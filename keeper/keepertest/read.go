package keepertest

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/watch"
)

func (s *Server) get(c call) ([]byte, error) {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	found, err := s.store.find(c.resource, c.Namespace, c.Name)
	if err != nil {
		return nil, err
	}
	return found.json, nil
}

// list answers with all objects in one page and in their present state. It ignores resourceVersion.
func (s *Server) list(c call) ([]byte, error) {
	selected, err := selection(c)
	if err != nil {
		return nil, err
	}
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	var items [][]byte
	for _, object := range s.store.all(c.resource, c.Namespace) {
		if selected(object) {
			items = append(items, object.json)
		}
	}
	return fmt.Appendf(nil,
		`{"kind":"%sList","apiVersion":"%s","metadata":{"resourceVersion":"%d"},"items":[%s]}`,
		c.object.Name(), c.GroupVersion(), len(s.store.history), bytes.Join(items, []byte(","))), nil
}

// selection returns a function that reports whether a list or watch includes an object.
func selection(c call) (func(*stored) bool, error) {
	byLabel, err := labels.Parse(c.query.Get("labelSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	byField, err := fields.ParseSelector(c.query.Get("fieldSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	for _, term := range byField.Requirements() {
		if term.Field != "metadata.name" && term.Field != "metadata.namespace" &&
			(term.Field != "spec.nodeName" || c.resource != pods) {
			return nil, apierrors.NewBadRequest("field label not supported: " + term.Field)
		}
	}
	return func(s *stored) bool {
		if s == nil || c.Namespace != "" && s.object.GetNamespace() != c.Namespace {
			return false
		}
		set := fields.Set{"metadata.name": s.object.GetName(),
			"metadata.namespace": s.object.GetNamespace()}
		if pod, ok := s.object.(*corev1.Pod); ok {
			set["spec.nodeName"] = pod.Spec.NodeName
		}
		return byLabel.Matches(labels.Set(s.object.GetLabels())) && byField.Matches(set)
	}, nil
}

// watch streams changes until the client or the server ends it. If it returns an error, it has sent
// nothing, and the error is the response.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, c call) error {
	selected, err := selection(c)
	if err != nil {
		return err
	}
	lines, seen, err := s.initial(c, selected)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	for {
		_, _ = w.Write(lines)
		w.(http.Flusher).Flush()
		var changed <-chan struct{}
		if lines, seen, changed = s.since(c, selected, seen); lines != nil {
			continue
		}
		select {
		case <-r.Context().Done():
			return nil
		case <-s.closed:
			return nil
		case <-changed:
		}
	}
}

// initial returns the objects with which a watch begins, and the version that the watch has seen. A
// watch begins with objects if it names no resourceVersion.
func (s *Server) initial(c call, selected func(*stored) bool) ([]byte, int, error) {
	version := c.query.Get("resourceVersion")
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	if version != "" && version != "0" {
		seen, err := strconv.Atoi(version)
		if err != nil || seen < 0 || seen > len(s.store.history) {
			return nil, 0, apierrors.NewBadRequest("there is no resourceVersion " + version)
		}
		return nil, seen, nil
	}
	var lines []byte
	for _, object := range s.store.all(c.resource, c.Namespace) {
		if selected(object) {
			lines = appendLine(lines, watch.Added, object.json)
		}
	}
	return lines, len(s.store.history), nil
}

// since returns the changes after a version as lines of a watch, the version of the last change,
// and a channel that the next change closes. An object that begins to match the selection is
// reported as added, one that no longer matches as deleted.
func (s *Server) since(c call, selected func(*stored) bool, seen int) ([]byte, int,
	<-chan struct{}) {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	var lines []byte
	for i, change := range s.store.history[seen:] {
		if change.resource != c.resource {
			continue
		}
		was, is := selected(change.before), selected(change.after)
		switch {
		case is && was:
			lines = appendLine(lines, watch.Modified, change.after.json)
		case is:
			lines = appendLine(lines, watch.Added, change.after.json)
		case was:
			last := change.before.copy()
			last.SetResourceVersion(strconv.Itoa(seen + i + 1))
			lines = appendLine(lines, watch.Deleted, encode(last))
		}
	}
	return lines, len(s.store.history), s.store.changed
}

func appendLine(lines []byte, kind watch.EventType, object []byte) []byte {
	return fmt.Appendf(lines, "{\"type\":%q,\"object\":%s}\n", kind, object)
}
