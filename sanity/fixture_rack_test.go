//go:build linux

package sanity

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// protoCmp compares messages by their fields.
var protoCmp cmp.Option = protocmp.Transform()

// topologyRack is the driver's topology key for racks.
const topologyRack = "topology.csi.oxide.computer/rack"

func codeOf(err error) codes.Code { return status.Code(err) }

// inBackground starts a call, and returns a function that waits for its success.
func inBackground[T any](call func() (T, error)) func() T {
	var (
		result T
		err    error
	)
	done := make(chan struct{})
	go func() {
		defer close(done)
		result, err = call()
	}()
	return func() T {
		GinkgoHelper()
		<-done
		Expect(err).NotTo(HaveOccurred())
		return result
	}
}

// rackJSON returns the unchanged JSON of an answer of the rack, for specs that edit it.
func (f *faultFixture) rackJSON(ctx context.Context, path string,
	query map[string]string) map[string]any {
	GinkgoHelper()
	body, err := f.rack.Get(ctx, path, query)
	Expect(err).NotTo(HaveOccurred())
	var answer map[string]any
	Expect(json.Unmarshal(body, &answer)).To(Succeed())
	return answer
}

// rackPage returns the first page of the project's objects, in the order in which the driver
// lists them.
func (f *faultFixture) rackPage(ctx context.Context, path string) map[string]any {
	GinkgoHelper()
	return f.rackJSON(ctx, path, map[string]string{"project": f.rack.Project, "limit": "1000",
		"sort_by": "id_ascending"})
}

// answer makes the rack give this answer to an operation on an object, until the spec ends.
func (f *faultFixture) answer(ctx context.Context, operation, object string, answer any) {
	GinkgoHelper()
	body, err := json.Marshal(answer)
	Expect(err).NotTo(HaveOccurred())
	f.fault(ctx, adminapi.Fault{Operation: operation, Object: object, Phase: adminapi.Instead,
		Response: &adminapi.Response{Status: http.StatusOK, Body: string(body),
			ContentType: "application/json"}})
}

// refuse makes the rack refuse an operation on an object, until the spec ends.
func (f *faultFixture) refuse(
	ctx context.Context, operation, object string, statusCode int, code, message string,
) {
	GinkgoHelper()
	f.fault(ctx, adminapi.Fault{Operation: operation, Object: object, Phase: adminapi.Instead,
		Response: &adminapi.Response{Status: statusCode, ErrorCode: code, Message: message}})
}

// diskState returns a disk's state in the rack's format.
func diskState(state, instance string) map[string]any {
	value := map[string]any{"state": state}
	if instance != "" {
		value["instance"] = instance
	}
	return value
}

// pretend makes the rack show the volume's disk in a state that a spec cannot cause, in every
// answer. instance belongs to the states that have one.
func (f *faultFixture) pretend(ctx context.Context, volume *csi.Volume, state, instance string) {
	GinkgoHelper()
	id := volume.GetVolumeId()
	disk := f.rackJSON(ctx, "/v1/disks/"+id, nil)
	disk["state"] = diskState(state, instance)
	for _, object := range []string{id, disk["name"].(string)} {
		f.answer(ctx, "disk_view", object, disk)
	}
	f.pretendListed(ctx, "disk_list", "/v1/disks", id, disk)
}

// pretendListed makes a list show one of its objects with other values.
func (f *faultFixture) pretendListed(ctx context.Context, operation, path, id string, object any) {
	GinkgoHelper()
	page := f.rackPage(ctx, path)
	items := page["items"].([]any)
	i := slices.IndexFunc(items, func(item any) bool {
		return item.(map[string]any)["id"] == id
	})
	Expect(i).To(BeNumerically(">=", 0), "%s does not list %s", path, id)
	items[i] = object
	// The page is the last one, so that a request for the next page does not get this one again.
	page["next_page"] = nil
	f.answer(ctx, operation, "", page)
}
