package keepertest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
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

// resource is a resource that the server has.
type resource struct {
	schema.GroupVersionResource
	namespaced bool
	object     reflect.Type // a struct, named as the kind
}

var (
	nodes   = has[corev1.Node](corev1.SchemeGroupVersion, "nodes", cluster)
	pods    = has[corev1.Pod](corev1.SchemeGroupVersion, "pods", namespaced)
	budgets = has[policyv1.PodDisruptionBudget](policyv1.SchemeGroupVersion,
		"poddisruptionbudgets", namespaced)
)

var resources = []*resource{nodes, pods, budgets,
	has[corev1.Event](corev1.SchemeGroupVersion, "events", namespaced),
	has[eventsv1.Event](eventsv1.SchemeGroupVersion, "events", namespaced),
	has[corev1.PersistentVolume](corev1.SchemeGroupVersion, "persistentvolumes", cluster),
	has[corev1.PersistentVolumeClaim](corev1.SchemeGroupVersion, "persistentvolumeclaims",
		namespaced),
	has[storagev1.CSINode](storagev1.SchemeGroupVersion, "csinodes", cluster),
	has[storagev1.VolumeAttachment](storagev1.SchemeGroupVersion, "volumeattachments", cluster),
	has[coordinationv1.Lease](coordinationv1.SchemeGroupVersion, "leases", namespaced),
	has[appsv1.StatefulSet](appsv1.SchemeGroupVersion, "statefulsets", namespaced),
}

const cluster, namespaced = false, true

func has[S any](version schema.GroupVersion, plural string, namespaced bool) *resource {
	return &resource{version.WithResource(plural), namespaced, reflect.TypeFor[S]()}
}

func (r *resource) kind() schema.GroupVersionKind {
	return r.GroupVersion().WithKind(r.object.Name())
}

func (r *resource) new() Object { return reflect.New(r.object).Interface().(Object) }

// resourceOf panics if the server has no objects of the type.
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

// call is a parsed request.
type call struct {
	Request
	*resource
	query   url.Values
	content string // the body's type
	unknown string // what of it the server does not know
}

// parameters are those that the server follows or may ignore. A server need not split a list into
// pages, and need not send bookmarks.
var parameters = map[string]bool{"fieldSelector": true, "labelSelector": true, "watch": true,
	"resourceVersion": true, "resourceVersionMatch": true, "sendInitialEvents": true, "limit": true,
	"allowWatchBookmarks": true, "timeoutSeconds": true, "timeout": true, "fieldManager": true,
	"fieldValidation": true}

func parse(r *http.Request, body []byte) call {
	c := call{Request: Request{Client: r.UserAgent(), Body: body}, query: r.URL.Query(),
		content: r.Header.Get("Content-Type")}
	version, rest := "", strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case rest[0] == "api" && len(rest) > 2:
		version, rest = rest[1], rest[2:]
	case rest[0] == "apis" && len(rest) > 3:
		c.Group, version, rest = rest[1], rest[2], rest[3:]
	}
	if rest[0] == "namespaces" && len(rest) > 2 {
		c.Namespace, rest = rest[1], rest[2:]
	}
	path := [4]string{} // and one too many
	copy(path[:], rest)
	c.Resource, c.Name, c.Subresource = path[0], path[1], path[2]
	for _, known := range resources {
		if known.GroupVersionResource == (schema.GroupVersionResource{Group: c.Group,
			Version: version, Resource: c.Resource}) {
			c.resource = known
		}
	}
	c.Verb = verb(r, c)
	if c.Verb == "create" && c.Name == "" {
		var named metav1.PartialObjectMetadata
		if json.Unmarshal(body, &named) == nil {
			c.Name = named.Name
		}
	}
	switch {
	case c.resource == nil || path[3] != "":
		c.unknown = "the path " + r.URL.Path
	case c.Verb == "":
		c.unknown = r.Method + " of the path " + r.URL.Path
	}
	for name := range c.query {
		if !parameters[name] {
			c.unknown = "the parameter " + name
		}
	}
	return c
}

// verb returns "" for a verb that the resource or subresource does not have.
func verb(r *http.Request, c call) string {
	if c.resource == nil {
		return strings.ToLower(r.Method)
	}
	named := c.Name != ""
	if (named || r.Method != http.MethodGet) && c.namespaced != (c.Namespace != "") {
		return ""
	}
	form := c.Subresource
	if !named {
		form = "all"
	}
	if form == "status" {
		if _, has := c.object.FieldByName("Status"); !has {
			return ""
		}
	}
	watching := c.query.Get("watch") == "true" || c.query.Get("watch") == "1"
	switch form + " " + r.Method {
	case "all GET":
		if watching {
			return "watch"
		}
		return "list"
	case " GET":
		return "get"
	case "all POST":
		return "create"
	case "eviction POST":
		if c.resource == pods {
			return "create"
		}
	case " PUT", "status PUT":
		return "update"
	case " PATCH", "status PATCH":
		return "patch"
	case " DELETE":
		return "delete"
	}
	return ""
}
