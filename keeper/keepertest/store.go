package keepertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
)

// Object is a pointer to a served object, for example *corev1.Node.
type Object interface {
	metav1.Object
	runtime.Object
}

type resource struct {
	schema.GroupVersionResource
	kind       schema.GroupVersionKind
	namespaced bool
	object     reflect.Type // the Go type of the objects; its name is the kind
}

const cluster, namespaced = false, true

var (
	pods    = has[corev1.Pod](namespaced)
	budgets = has[policyv1.PodDisruptionBudget](namespaced)
)

var resources = []*resource{pods, budgets, has[corev1.Node](cluster),
	has[corev1.ConfigMap](namespaced), has[corev1.Event](namespaced),
	has[corev1.PersistentVolume](cluster), has[corev1.PersistentVolumeClaim](namespaced),
	has[storagev1.CSIDriver](cluster), has[storagev1.CSINode](cluster),
	has[storagev1.VolumeAttachment](cluster), has[coordinationv1.Lease](namespaced)}

func has[S any](namespaced bool) *resource {
	r := &resource{namespaced: namespaced, object: reflect.TypeFor[S]()}
	kinds, _, err := scheme.Scheme.ObjectKinds(r.new())
	if err != nil {
		panic(err)
	}
	r.kind = kinds[0]
	r.GroupVersionResource, _ = meta.UnsafeGuessKindToResource(r.kind)
	return r
}

func (r *resource) new() Object { return reflect.New(r.object).Interface().(Object) }

func resourceOf[O Object]() *resource {
	return resources[slices.IndexFunc(resources, func(r *resource) bool {
		return reflect.PointerTo(r.object) == reflect.TypeFor[O]()
	})]
}

func statusField(o Object) reflect.Value { return reflect.ValueOf(o).Elem().FieldByName("Status") }

// routes maps the resource's methods and paths to verbs, such as "get" or "create/eviction".
func (r *resource) routes() map[string]string {
	// The core group's paths begin with /api instead of /apis/GROUP.
	all := "/" + strings.TrimSuffix("apis/"+r.Group, "s/") + "/" + r.Version + "/"
	in := all + r.Resource
	if r.namespaced {
		in = all + "namespaces/{namespace}/" + r.Resource
	}
	one := in + "/{name}"
	routes := map[string]string{"GET " + all + r.Resource: "list", "GET " + in: "list",
		"POST " + in: "create", "GET " + one: "get", "PUT " + one: "update",
		"PATCH " + one: "patch", "DELETE " + one: "delete"}
	if r == pods {
		routes["POST "+one+"/eviction"] = "create/eviction"
	}
	return routes
}

type call struct {
	KubeRequest
	*resource
	query url.Values
}

// parse parses a request. An unknown query parameter or type of patch fails the test.
func (s *Server) parse(r *http.Request, to *resource, verb string, body []byte) call {
	c := call{resource: to, query: r.URL.Query(), KubeRequest: KubeRequest{Client: r.UserAgent(),
		Resource: to.Resource, Namespace: r.PathValue("namespace"), Name: r.PathValue("name"),
		Body: body}}
	c.Verb, c.Subresource, _ = strings.Cut(verb, "/")
	if watch := c.query.Get("watch"); c.Verb == "list" && (watch == "true" || watch == "1") {
		c.Verb = "watch"
	}
	var named metav1.PartialObjectMetadata
	if c.Verb == "create" && c.Name == "" && json.Unmarshal(body, &named) == nil {
		c.Name = named.Name
	}
	for name := range c.query {
		if !slices.Contains([]string{"fieldSelector", "labelSelector", "watch"}, name) {
			s.t.Errorf("the server of package keepertest does not know the parameter %s (%s)", name,
				c.KubeRequest)
		}
	}
	if c.Verb == "patch" && r.Header.Get("Content-Type") != string(types.MergePatchType) {
		s.t.Errorf("the server of package keepertest only knows merge patches (%s)", c.KubeRequest)
	}
	return c
}

func (s *Server) list(c call) ([]byte, error) {
	byLabel, err := labels.Parse(c.query.Get("labelSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	byField, err := fields.ParseSelector(c.query.Get("fieldSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	var items [][]byte
	for _, found := range s.all(c.resource, c.Namespace) {
		set := fields.Set{"metadata.name": found.object.GetName()}
		if pod, ok := found.object.(*corev1.Pod); ok {
			set["spec.nodeName"] = pod.Spec.NodeName
		}
		if byLabel.Matches(labels.Set(found.object.GetLabels())) && byField.Matches(set) {
			items = append(items, found.json)
		}
	}
	return fmt.Appendf(nil,
		`{"kind":"%sList","apiVersion":"%s","metadata":{"resourceVersion":"%d"},"items":[%s]}`,
		c.object.Name(), c.GroupVersion(), len(s.history), bytes.Join(items, []byte(","))), nil
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, c call) {
	w.Header().Set("Content-Type", "application/json")
	for seen := 0; ; {
		s.mu.Lock()
		news, changed := s.history[seen:], s.changed
		s.mu.Unlock()
		for _, change := range news {
			if change.resource == c.resource {
				_, _ = fmt.Fprintf(w, "{\"type\":%q,\"object\":%s}\n", change.kind, change.json)
			}
		}
		seen += len(news)
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-s.closed:
			return
		case <-changed:
		}
	}
}

// succeeded is the response to deletions and evictions. Typed clients ignore it.
const succeeded = `{"kind":"Status","apiVersion":"v1","status":"Success"}`

func (s *Server) apply(c call) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.Verb == "list" {
		return s.list(c)
	}
	creates := c.Verb == "create" && c.Subresource == ""
	old, err := s.find(c.resource, c.Namespace, c.Name)
	switch {
	case creates && err == nil:
		return nil, apierrors.NewAlreadyExists(c.GroupResource(), c.Name)
	case creates:
	case err != nil:
		return nil, err
	case c.Verb == "get":
		return old.json, nil
	case c.Subresource == "eviction":
		return []byte(succeeded), s.evict(c, old)
	case c.Verb == "delete":
		var options metav1.DeleteOptions
		if err := decode(c.Body, &options); err != nil {
			return nil, err
		}
		return []byte(succeeded), s.remove(c.resource, old, options)
	case c.Verb == "patch":
		var whole, patch map[string]any
		if err := errors.Join(decode(old.json, &whole), decode(c.Body, &patch)); err != nil {
			return nil, err
		}
		c.Body = encode(merge(whole, patch))
	}
	object := c.new()
	if err := decode(c.Body, object); err != nil {
		return nil, err
	}
	object.SetNamespace(c.Namespace)
	if status := statusField(object); status.IsValid() {
		status.SetZero() // only a controller writes a status
		if old != nil {
			status.Set(statusField(old.copy()))
		}
	}
	written, err := s.put(c.resource, old, object)
	if err != nil {
		return nil, err
	}
	return written.json, nil
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

// evict deletes a pod if its disruption budget allows it. It follows Kubernetes 1.35
// (pkg/registry/core/pod/storage/eviction.go) for a pod with at most one budget, which has no
// unhealthyPodEvictionPolicy.
func (s *Server) evict(c call, old *stored) error {
	var eviction policyv1.Eviction
	if err := decode(c.Body, &eviction); err != nil {
		return err
	}
	pod := old.object.(*corev1.Pod)
	// A budget does not count a pod that has ended, has not begun, or is being deleted.
	if !slices.Contains([]corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed,
		corev1.PodPending}, pod.Status.Phase) && pod.DeletionTimestamp == nil {
		if err := s.disrupt(pod); err != nil {
			return err
		}
	}
	return s.remove(c.resource, old, ptr.Deref(eviction.DeleteOptions, metav1.DeleteOptions{}))
}

func (s *Server) disrupt(pod *corev1.Pod) error {
	var found *stored
	for _, b := range s.all(budgets, pod.Namespace) {
		selector, err := metav1.LabelSelectorAsSelector(
			b.object.(*policyv1.PodDisruptionBudget).Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
			found = b
		}
	}
	if found == nil {
		return nil
	}
	budget := found.copy().(*policyv1.PodDisruptionBudget)
	status := &budget.Status
	ready := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	if !ready && status.CurrentHealthy >= status.DesiredHealthy && status.DesiredHealthy > 0 {
		return nil
	}
	if status.DisruptionsAllowed <= 0 {
		return apierrors.NewTooManyRequests(
			"Cannot evict pod as it would violate the pod's disruption budget.", 0)
	}
	status.DisruptionsAllowed--
	_, err := s.put(budgets, found, budget)
	return err
}

type stored struct {
	object Object
	json   []byte
}

func (s *stored) copy() Object { return s.object.DeepCopyObject().(Object) }

type change struct {
	*resource
	kind watch.EventType
	json []byte
}

func key(namespace, name string) string { return namespace + "/" + name }

func (s *Server) find(r *resource, namespace, name string) (*stored, error) {
	if found := s.objects[r][key(namespace, name)]; found != nil {
		return found, nil
	}
	return nil, apierrors.NewNotFound(r.GroupResource(), name)
}

func (s *Server) all(r *resource, namespace string) []*stored {
	var found []*stored
	for _, key := range slices.Sorted(maps.Keys(s.objects[r])) {
		object := s.objects[r][key]
		if namespace == "" || object.object.GetNamespace() == namespace {
			found = append(found, object)
		}
	}
	return found
}

// put replaces old, or creates the object if old is nil. It returns a conflict if the object has
// another resourceVersion or UID than old.
func (s *Server) put(r *resource, old *stored, object Object) (*stored, error) {
	if old == nil {
		object.SetUID(types.UID(fmt.Sprintf("%08x-0000-4000-8000-000000000000", len(s.history)+1)))
		object.SetCreationTimestamp(metav1.NewTime(s.now()))
		object.SetDeletionTimestamp(nil)
		object.SetDeletionGracePeriodSeconds(nil)
		return s.write(r, nil, object), nil
	}
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
	return s.write(r, old, object), nil
}

// remove deletes an object. If the object has finalizers, or is a pod with a grace period, remove
// only marks it for deletion.
func (s *Server) remove(r *resource, old *stored, o metav1.DeleteOptions) error {
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
	s.write(r, old, object)
	return nil
}

// write stores an object, or removes it if its grace period is over and it has no finalizer. As in
// an API server, a write that changes nothing creates no new resourceVersion.
func (s *Server) write(r *resource, old *stored, object Object) *stored {
	grace := object.GetDeletionGracePeriodSeconds()
	if grace != nil && *grace == 0 && len(object.GetFinalizers()) == 0 {
		delete(s.objects[r], key(object.GetNamespace(), object.GetName()))
		s.record(change{r, watch.Deleted, old.json})
		return old
	}
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

func (s *Server) record(c change) {
	s.history = append(s.history, c)
	close(s.changed)
	s.changed = make(chan struct{})
}

// Put creates or replaces an object, including its status, and returns the stored object. It
// ignores the uid and the resourceVersion of its argument.
func Put[O Object](s *Server, object O) O {
	next := object.DeepCopyObject().(Object)
	next.SetUID("")
	next.SetResourceVersion("")
	r := resourceOf[O]()
	s.mu.Lock()
	defer s.mu.Unlock()
	old, _ := s.find(r, object.GetNamespace(), object.GetName())
	written, err := s.put(r, old, next)
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
		_, err := s.put(r, old, next)
		return err
	})
}

// Get returns an object. A cluster-wide object has the namespace "".
func Get[O Object](s *Server, namespace, name string) (object O, ok bool) {
	ok = with[O](s, namespace, name, func(_ *resource, found *stored) error {
		object = found.copy().(O)
		return nil
	})
	return object, ok
}

// List returns a namespace's objects (all objects for ""), sorted by namespace and name.
func List[O Object](s *Server, namespace string) []O {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []O
	for _, object := range s.all(resourceOf[O](), namespace) {
		list = append(list, object.copy().(O))
	}
	return list
}

// Delete deletes an object as a client does, and reports whether it existed. An object with
// finalizers only gets a deletionTimestamp, as does a scheduled pod, which Remove then removes.
func Delete[O Object](s *Server, namespace, name string) bool {
	return with[O](s, namespace, name, func(r *resource, old *stored) error {
		return s.remove(r, old, metav1.DeleteOptions{})
	})
}

// Remove deletes an object without a grace period, as a kubelet does with a pod that has ended. An
// object with finalizers stays.
func Remove[O Object](s *Server, namespace, name string) bool {
	return with[O](s, namespace, name, func(r *resource, old *stored) error {
		return s.remove(r, old, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
	})
}

// Volume returns a driver's PersistentVolume, bound to the claim of the same name.
func Volume(namespace, name, driver, handle string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: driver, VolumeHandle: handle}},
			ClaimRef: &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim",
				Namespace: namespace, Name: name, UID: types.UID("claim-" + name)}}}
}

// Bind puts a PersistentVolume and the claim to which it is bound.
func Bind(s *Server, v *corev1.PersistentVolume) {
	claim := v.Spec.ClaimRef
	claim.UID = Put(s, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name},
		Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: v.Name}}).UID
	Put(s, v)
}

// Pod returns a pod that uses the claims.
func Pod(namespace, name, node string, claims ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{NodeName: node}}
	for _, c := range claims {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: c, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: c}}})
	}
	return p
}

func with[O Object](s *Server, namespace, name string, f func(*resource, *stored) error) bool {
	r := resourceOf[O]()
	s.mu.Lock()
	defer s.mu.Unlock()
	found, err := s.find(r, namespace, name)
	if err != nil {
		return false
	}
	if err := f(r, found); err != nil {
		panic(err)
	}
	return true
}
