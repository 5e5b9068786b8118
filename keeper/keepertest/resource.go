package keepertest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Object is a pointer to an object of one of the server's resources, for example *corev1.Node.
type Object interface {
	metav1.Object
	runtime.Object
}

// resource describes a resource that the server has.
type resource struct {
	schema.GroupVersionResource
	namespaced bool
	object     reflect.Type // a struct with the name of the kind
}

const cluster, namespaced = false, true

var (
	nodes   = has[corev1.Node](corev1.SchemeGroupVersion, "nodes", cluster)
	pods    = has[corev1.Pod](corev1.SchemeGroupVersion, "pods", namespaced)
	budgets = has[policyv1.PodDisruptionBudget](policyv1.SchemeGroupVersion,
		"poddisruptionbudgets", namespaced)
)

var resources = []*resource{nodes, pods, budgets,
	has[corev1.ConfigMap](corev1.SchemeGroupVersion, "configmaps", namespaced),
	has[corev1.Event](corev1.SchemeGroupVersion, "events", namespaced),
	has[corev1.PersistentVolume](corev1.SchemeGroupVersion, "persistentvolumes", cluster),
	has[corev1.PersistentVolumeClaim](corev1.SchemeGroupVersion, "persistentvolumeclaims",
		namespaced),
	has[storagev1.CSIDriver](storagev1.SchemeGroupVersion, "csidrivers", cluster),
	has[storagev1.CSINode](storagev1.SchemeGroupVersion, "csinodes", cluster),
	has[storagev1.VolumeAttachment](storagev1.SchemeGroupVersion, "volumeattachments", cluster),
	has[coordinationv1.Lease](coordinationv1.SchemeGroupVersion, "leases", namespaced),
}

func has[S any](version schema.GroupVersion, plural string, namespaced bool) *resource {
	return &resource{version.WithResource(plural), namespaced, reflect.TypeFor[S]()}
}

func (r *resource) kind() schema.GroupVersionKind {
	return r.GroupVersion().WithKind(r.object.Name())
}

func (r *resource) new() Object { return reflect.New(r.object).Interface().(Object) }

// resourceOf returns the resource of an object type, or panics if the server has none.
func resourceOf[O Object]() *resource {
	for _, r := range resources {
		if reflect.PointerTo(r.object) == reflect.TypeFor[O]() {
			return r
		}
	}
	panic(fmt.Sprintf("the server of package keepertest has no %s", reflect.TypeFor[O]()))
}

// statusField returns an object's field Status. It is invalid if the kind has none.
func statusField(o Object) reflect.Value { return reflect.ValueOf(o).Elem().FieldByName("Status") }

// routes returns the verb and subresource for each method and path of the resource.
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
	if statusField(r.new()).IsValid() {
		routes["PUT "+one+"/status"], routes["PATCH "+one+"/status"] = "update/status", "patch/status"
	}
	if r == pods {
		routes["POST "+one+"/eviction"] = "create/eviction"
	}
	return routes
}

// call is a parsed request.
type call struct {
	KubeRequest
	*resource
	query   url.Values
	content string // the body's media type
	unknown string // the part of the request that the server does not know
}

// parameters contains the query parameters that the server follows or may ignore. A server need not
// split a list into pages, end a watch in time or send bookmarks.
var parameters = map[string]bool{"fieldSelector": true, "labelSelector": true, "watch": true,
	"resourceVersion": true, "resourceVersionMatch": true, "limit": true,
	"allowWatchBookmarks": true, "timeoutSeconds": true, "timeout": true, "fieldManager": true,
	"fieldValidation": true}

// parse parses a request. Without a resource it is a request to one that the server does not have.
func parse(r *http.Request, to *resource, verb string, body []byte) call {
	c := call{resource: to, query: r.URL.Query(), content: r.Header.Get("Content-Type")}
	c.KubeRequest = KubeRequest{Client: r.UserAgent(), Namespace: r.PathValue("namespace"),
		Name: r.PathValue("name"), Body: body}
	c.Verb, c.Subresource, _ = strings.Cut(verb, "/")
	if to == nil {
		c.Resource, c.unknown = r.URL.Path, "this path or method"
		return c
	}
	c.Group, c.Resource = to.Group, to.Resource
	if watch := c.query.Get("watch"); c.Verb == "list" && (watch == "true" || watch == "1") {
		c.Verb = "watch"
	}
	var named metav1.PartialObjectMetadata
	if c.Verb == "create" && c.Name == "" && json.Unmarshal(body, &named) == nil {
		c.Name = named.Name
	}
	for name, values := range c.query {
		if !parameters[name] || values[0] == string(metav1.ResourceVersionMatchExact) {
			c.unknown = "the parameter " + name + "=" + values[0]
		}
	}
	return c
}
