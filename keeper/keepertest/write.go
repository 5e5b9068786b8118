package keepertest

import (
	"bytes"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// succeeded is the response to deletions and evictions. Typed clients ignore it.
const succeeded = `{"kind":"Status","apiVersion":"v1","status":"Success"}`

// apply applies a request that changes something.
func (s *Server) apply(c call) ([]byte, error) {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	if c.Verb == "create" && c.Subresource == "" {
		return s.create(c)
	}
	old, err := s.store.find(c.resource, c.Namespace, c.Name)
	if err != nil {
		return nil, err
	}
	switch {
	case c.Subresource == "eviction":
		return s.evict(c, old)
	case c.Verb == "delete":
		var options metav1.DeleteOptions
		if err := decode(c.Body, &options); err != nil {
			return nil, err
		}
		return s.delete(c, old, options)
	}
	body := c.Body
	if c.Verb == "patch" {
		if body, err = s.patched(c, old); err != nil {
			return nil, err
		}
	}
	object := c.new()
	if err := decode(body, object); err != nil {
		return nil, err
	}
	return s.update(c, old, object)
}

func (s *Server) create(c call) ([]byte, error) {
	object := c.new()
	if err := decode(c.Body, object); err != nil {
		return nil, err
	}
	if object.GetNamespace() == "" {
		object.SetNamespace(c.Namespace)
	}
	if object.GetNamespace() != c.Namespace {
		return nil, apierrors.NewBadRequest("the namespace of the provided object does not match " +
			"the namespace sent on the request")
	}
	if object.GetResourceVersion() != "" {
		return nil, apierrors.NewBadRequest(
			"resourceVersion should not be set on objects to be created")
	}
	// A kubelet creates its node with a status. Other statuses are written by controllers.
	if status := statusField(object); status.IsValid() && c.resource != nodes {
		status.SetZero()
	}
	created, err := s.store.create(c.resource, object)
	if err != nil {
		return nil, err
	}
	return created.json, nil
}

// update replaces either the object without its status, or only the status.
func (s *Server) update(c call, old *stored, object Object) ([]byte, error) {
	if object.GetName() != c.Name || object.GetNamespace() != c.Namespace {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the object is called %s, and the URL has %s",
			key(object.GetNamespace(), object.GetName()), key(c.Namespace, c.Name)))
	}
	if c.Subresource == "status" {
		whole := old.copy()
		whole.SetResourceVersion(object.GetResourceVersion())
		whole.SetUID(object.GetUID())
		statusField(whole).Set(statusField(object))
		object = whole
	} else if status := statusField(object); status.IsValid() {
		status.Set(statusField(old.copy()))
	}
	updated, err := s.store.update(c.resource, old, object)
	if err != nil {
		return nil, err
	}
	return updated.json, nil
}

func (s *Server) delete(c call, old *stored, options metav1.DeleteOptions) ([]byte, error) {
	if options.PropagationPolicy != nil || len(options.DryRun) > 0 {
		return nil, s.notImplemented(c, "propagationPolicy and dryRun")
	}
	return []byte(succeeded), s.store.remove(c.resource, old, options)
}

// patched returns the JSON of the patched object.
func (s *Server) patched(c call, old *stored) ([]byte, error) {
	if types.PatchType(c.content) != types.MergePatchType {
		return nil, s.notImplemented(c, "patches of the type "+c.content)
	}
	var object, patch map[string]any
	if err := decode(old.json, &object); err != nil {
		return nil, err
	}
	if err := decode(c.Body, &patch); err != nil {
		return nil, err
	}
	return encode(merge(object, patch)), nil
}

// merge applies a JSON merge patch (RFC 7396).
func merge(object, patch map[string]any) map[string]any {
	if object == nil {
		object = map[string]any{}
	}
	for field, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(object, field)
		case map[string]any:
			inner, _ := object[field].(map[string]any)
			object[field] = merge(inner, value)
		default:
			object[field] = value
		}
	}
	return object
}

// decode refuses fields that the type does not have. An API server would ignore them and warn.
func decode(body []byte, into any) error {
	if len(body) == 0 {
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return apierrors.NewBadRequest("strict decoding error: " + err.Error())
	}
	return nil
}
