package keepertest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// list answers with all objects in one page and in their present state, whatever resourceVersion is
// asked for.
func (s *Server) list(c call) ([]byte, error) {
	selected, err := selection(c)
	if err != nil {
		return nil, err
	}
	if match := c.query.Get("resourceVersionMatch"); match == "Exact" {
		return nil, s.notImplemented(c, "resourceVersionMatch=Exact")
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
		c.object.Name(), c.GroupVersion(), s.store.version, bytes.Join(items, []byte(","))), nil
}

// selection returns which objects a list or watch is about.
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

// watch streams changes until the client, its timeout or the server ends it. If it returns an
// error, nothing is sent yet, and the error is the response.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, c call) error {
	selected, err := selection(c)
	if err != nil {
		return err
	}
	ctx := r.Context()
	if seconds, err := strconv.Atoi(c.query.Get("timeoutSeconds")); err == nil {
		limited, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
		defer cancel()
		ctx = limited
	}
	lines, seen, err := s.initial(c, selected)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	for {
		if _, err := w.Write(lines); err != nil {
			return nil // the client went away
		}
		w.(http.Flusher).Flush()
		for lines = nil; lines == nil; {
			var changed <-chan struct{}
			if lines, seen, changed, err = s.since(c, selected, seen); err != nil {
				return nil // too late; the client hears why when it watches again
			}
			if lines != nil {
				break
			}
			select {
			case <-ctx.Done():
				return nil
			case <-s.closed:
				return nil
			case <-changed:
			}
		}
	}
}

// initial returns the objects that a watch begins with if it has no resourceVersion to begin after,
// or asks for them, and the version that the watch has seen.
func (s *Server) initial(c call, selected func(*stored) bool) ([]byte, int64, error) {
	version, all := c.query.Get("resourceVersion"), c.query.Get("sendInitialEvents") == "true"
	if version != "" && version != "0" && !all {
		seen, err := strconv.ParseInt(version, 10, 64)
		if err != nil {
			return nil, 0, apierrors.NewBadRequest("invalid resourceVersion: " + err.Error())
		}
		_, _, _, err = s.since(c, selected, seen)
		return nil, seen, err
	}
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	var lines []byte
	for _, object := range s.store.all(c.resource, c.Namespace) {
		if selected(object) {
			lines = appendLine(lines, watch.Added, object.json)
		}
	}
	if all {
		lines = appendLine(lines, watch.Bookmark, fmt.Appendf(nil, `{"kind":%q,"apiVersion":%q,`+
			`"metadata":{"resourceVersion":"%d","annotations":{%q:"true"}}}`, c.object.Name(),
			c.GroupVersion(), s.store.version, metav1.InitialEventsAnnotationKey))
	}
	return lines, s.store.version, nil
}

// since returns the changes after a version as lines of a watch, the version of the last one, and
// what is closed by the next. An object that comes to be selected is added, for the watch; one that
// is so no more is deleted.
func (s *Server) since(c call, selected func(*stored) bool, seen int64) ([]byte, int64,
	<-chan struct{}, error) {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	if seen < s.store.forgotten {
		return nil, 0, nil, apierrors.NewResourceExpired(fmt.Sprintf(
			"too old resource version: %d (%d)", seen, s.store.forgotten))
	}
	var lines []byte
	for ; seen < s.store.version; seen++ {
		change := s.store.history[seen-s.store.forgotten]
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
			last.SetResourceVersion(strconv.FormatInt(change.version, 10))
			encoded, err := json.Marshal(last)
			if err != nil {
				return nil, 0, nil, err
			}
			lines = appendLine(lines, watch.Deleted, encoded)
		}
	}
	return lines, seen, s.store.changed, nil
}

func appendLine(lines []byte, kind watch.EventType, object []byte) []byte {
	return fmt.Appendf(lines, "{\"type\":%q,\"object\":%s}\n", kind, object)
}
