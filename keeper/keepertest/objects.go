package keepertest

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Put creates or replaces an object, including its status, and returns the stored object. It
// ignores the object's uid and resourceVersion.
func Put[O Object](s *Server, object O) O {
	next := object.DeepCopyObject().(Object)
	next.SetUID("")
	next.SetResourceVersion("")
	r := resourceOf[O]()
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	old, err := s.store.find(r, object.GetNamespace(), object.GetName())
	var written *stored
	if err != nil {
		written, err = s.store.create(r, next)
	} else {
		written, err = s.store.update(r, old, next)
	}
	if err != nil {
		panic(fmt.Sprintf("put %T: %v", object, err))
	}
	return written.copy().(O)
}

// Edit changes an object, including its status, under the store's lock. It returns false if the
// object does not exist.
func Edit[O Object](s *Server, namespace, name string, change func(O)) bool {
	return with[O](s, namespace, name, func(r *resource, old *stored) error {
		next := old.copy().(O)
		change(next)
		_, err := s.store.update(r, old, next)
		return err
	})
}

// Get returns an object. The namespace of a node is "".
func Get[O Object](s *Server, namespace, name string) (object O, ok bool) {
	ok = with[O](s, namespace, name, func(_ *resource, found *stored) error {
		object = found.copy().(O)
		return nil
	})
	return object, ok
}

// List returns the objects of a namespace, or of all namespaces for "", sorted by namespace and
// name.
func List[O Object](s *Server, namespace string) []O {
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	var list []O
	for _, object := range s.store.all(resourceOf[O](), namespace) {
		list = append(list, object.copy().(O))
	}
	return list
}

// Delete deletes an object as a client does. An object with finalizers, and a pod that has a node,
// stay with a deletionTimestamp; Remove removes such a pod. It returns false if the object does not
// exist.
func Delete[O Object](s *Server, namespace, name string) bool {
	return with[O](s, namespace, name, func(r *resource, old *stored) error {
		return s.store.remove(r, old, metav1.DeleteOptions{})
	})
}

// Remove deletes an object without a grace period, as a kubelet does with a pod that has ended. An
// object with finalizers stays.
func Remove[O Object](s *Server, namespace, name string) bool {
	return with[O](s, namespace, name, func(r *resource, old *stored) error {
		return s.store.remove(r, old, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
	})
}

// with calls f with an object if it exists. An error of f is a mistake in the test.
func with[O Object](s *Server, namespace, name string, f func(*resource, *stored) error) bool {
	r := resourceOf[O]()
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	found, err := s.store.find(r, namespace, name)
	if err != nil {
		return false
	}
	if err := f(r, found); err != nil {
		panic(err)
	}
	return true
}
