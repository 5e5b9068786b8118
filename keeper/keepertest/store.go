package keepertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

type store struct {
	now func() time.Time
	mu  sync.Mutex
	// guarded by mu
	objects map[*resource]map[string]*stored
	history []change      // its length is the current resourceVersion
	changed chan struct{} // the next change closes it
}

type stored struct {
	object Object
	json   []byte
}

func (s *stored) copy() Object { return s.object.DeepCopyObject().(Object) }

// change is a change of an object, as a watch shows it.
type change struct {
	*resource
	kind watch.EventType
	json []byte
}

func key(namespace, name string) string { return namespace + "/" + name }

// find returns an object, or the error of an API server if it does not exist.
func (s *store) find(r *resource, namespace, name string) (*stored, error) {
	if found := s.objects[r][key(namespace, name)]; found != nil {
		return found, nil
	}
	return nil, apierrors.NewNotFound(r.GroupResource(), name)
}

// all returns the objects of a namespace, or of all namespaces for "", sorted by namespace and
// name.
func (s *store) all(r *resource, namespace string) []*stored {
	var found []*stored
	for _, key := range slices.Sorted(maps.Keys(s.objects[r])) {
		object := s.objects[r][key]
		if namespace == "" || object.object.GetNamespace() == namespace {
			found = append(found, object)
		}
	}
	return found
}

// create stores a new object.
func (s *store) create(r *resource, object Object) (*stored, error) {
	if _, err := s.find(r, object.GetNamespace(), object.GetName()); err == nil {
		return nil, apierrors.NewAlreadyExists(r.GroupResource(), object.GetName())
	}
	object.SetUID(types.UID(fmt.Sprintf("%08x-0000-4000-8000-000000000000",
		len(s.history)+1)))
	object.SetCreationTimestamp(metav1.NewTime(s.now()))
	object.SetDeletionTimestamp(nil)
	object.SetDeletionGracePeriodSeconds(nil)
	return s.write(r, nil, object), nil
}

// update replaces an object, unless it was replaced or has changed since. It removes the object if
// that is being deleted and has lost its last finalizer.
func (s *store) update(r *resource, old *stored, object Object) (*stored, error) {
	if version := object.GetResourceVersion(); version != "" &&
		version != old.object.GetResourceVersion() {
		return nil, apierrors.NewConflict(r.GroupResource(), object.GetName(), errors.New("the "+
			"object has been modified; please apply your changes to the latest version and try again"))
	}
	if uid := object.GetUID(); uid != "" && uid != old.object.GetUID() {
		return nil, apierrors.NewConflict(r.GroupResource(), object.GetName(), fmt.Errorf(
			"the object has the UID %s, not %s", old.object.GetUID(), uid))
	}
	object.SetUID(old.object.GetUID())
	object.SetCreationTimestamp(old.object.GetCreationTimestamp())
	object.SetDeletionTimestamp(old.object.GetDeletionTimestamp())
	object.SetDeletionGracePeriodSeconds(old.object.GetDeletionGracePeriodSeconds())
	return s.writeOrRemove(r, old, object), nil
}

// remove deletes an object. While the object has finalizers, or is a pod within its grace period,
// remove only marks it for deletion.
func (s *store) remove(r *resource, old *stored, o metav1.DeleteOptions) error {
	if want := o.Preconditions; want != nil {
		if want.UID != nil && *want.UID != old.object.GetUID() ||
			want.ResourceVersion != nil && *want.ResourceVersion != old.object.GetResourceVersion() {
			return apierrors.NewConflict(r.GroupResource(), old.object.GetName(), fmt.Errorf(
				"the precondition %s does not match UID %s and resourceVersion %s", want,
				old.object.GetUID(), old.object.GetResourceVersion()))
		}
	}
	object, grace := old.copy(), int64(0)
	if pod, ok := object.(*corev1.Pod); ok && pod.Spec.NodeName != "" &&
		pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
		grace = ptr.Deref(o.GracePeriodSeconds, corev1.DefaultTerminationGracePeriodSeconds)
	}
	// A second deletion can only shorten the grace period.
	if left := object.GetDeletionGracePeriodSeconds(); left == nil || grace < *left {
		object.SetDeletionTimestamp(&metav1.Time{
			Time: s.now().Add(time.Duration(grace) * time.Second)})
		object.SetDeletionGracePeriodSeconds(&grace)
	}
	s.writeOrRemove(r, old, object)
	return nil
}

// writeOrRemove writes an object, or removes it if it is being deleted and nothing holds it any
// more.
func (s *store) writeOrRemove(r *resource, old *stored, object Object) *stored {
	grace := object.GetDeletionGracePeriodSeconds()
	if grace == nil || *grace > 0 || len(object.GetFinalizers()) > 0 {
		return s.write(r, old, object)
	}
	delete(s.objects[r], key(object.GetNamespace(), object.GetName()))
	s.record(change{r, watch.Deleted, old.json})
	return old
}

// write stores an object. As in an API server, a write that changes nothing creates no version.
func (s *store) write(r *resource, old *stored, object Object) *stored {
	object.GetObjectKind().SetGroupVersionKind(r.kind)
	kind := watch.Added
	if old != nil {
		kind = watch.Modified
		object.SetResourceVersion(old.object.GetResourceVersion())
		if bytes.Equal(encode(object), old.json) {
			return old
		}
	}
	object.SetResourceVersion(strconv.Itoa(len(s.history) + 1))
	written := &stored{r.new(), encode(object)}
	if err := json.Unmarshal(written.json, written.object); err != nil {
		panic(err)
	}
	if s.objects[r] == nil {
		s.objects[r] = map[string]*stored{}
	}
	s.objects[r][key(object.GetNamespace(), object.GetName())] = written
	s.record(change{r, kind, written.json})
	return written
}

func encode(object any) []byte {
	encoded, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	return encoded
}

func (s *store) record(c change) {
	s.history = append(s.history, c)
	close(s.changed)
	s.changed = make(chan struct{})
}

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
