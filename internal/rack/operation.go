package rack

import (
	"net/http"
	"path"
)

// operations are those requests of the rack's API that the driver makes, by method and path
// (ASSUMPTIONS.md names them by the same operation ids).
var operations = []struct{ method, path, operation string }{
	{http.MethodGet, "/v1/disks", "disk_list"},
	{http.MethodPost, "/v1/disks", "disk_create"},
	{http.MethodGet, "/v1/disks/*", "disk_view"},
	{http.MethodDelete, "/v1/disks/*", "disk_delete"},
	{http.MethodGet, "/v1/instances", "instance_list"},
	{http.MethodGet, "/v1/instances/*", "instance_view"},
	{http.MethodGet, "/v1/instances/*/disks", "instance_disk_list"},
	{http.MethodPost, "/v1/instances/*/disks/attach", "instance_disk_attach"},
	{http.MethodPost, "/v1/instances/*/disks/detach", "instance_disk_detach"},
	{http.MethodGet, "/v1/snapshots", "snapshot_list"},
	{http.MethodPost, "/v1/snapshots", "snapshot_create"},
	{http.MethodGet, "/v1/snapshots/*", "snapshot_view"},
	{http.MethodDelete, "/v1/snapshots/*", "snapshot_delete"},
	{http.MethodGet, "/v1/projects/*", "project_view"},
	{http.MethodGet, "/v1/images/*", "image_view"},
	{http.MethodGet, "/v1/utilization", "utilization_view"},
	{http.MethodGet, "/v1/me", "current_user_view"},
	{http.MethodGet, "/v1/me/access-tokens", "current_user_access_token_list"},
}

// Operation returns the operation id of a request, or "other".
func Operation(r *http.Request) string {
	for _, o := range operations {
		if matches, _ := path.Match(o.path, r.URL.Path); matches && r.Method == o.method {
			return o.operation
		}
	}
	return "other"
}
