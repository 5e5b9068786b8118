//go:build linux

package sanity

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// strangeToken is a token that does not look like a token of a rack, and that changes when it is
// quoted or written as JSON. harness.ErrorRules finds the canary in it.
const strangeToken = `a"` + harness.Canary + `<b\c`

// echoing returns an answer that contains the request's token in every place that the driver
// reads.
func echoing(status int, errorCode, token string) *adminapi.Response {
	GinkgoHelper()
	body, err := json.Marshal(map[string]any{
		"request_id": token, "error_code": errorCode,
		"message": "Bearer " + token + " is not what was expected" + strings.Repeat(token, 100),
		"id":      token, "name": token, "description": token, "project_id": token, "items": []any{
			map[string]any{"id": token, "name": token, "description": token}}, "next_page": token,
		"state": map[string]any{"state": token},
	})
	Expect(err).NotTo(HaveOccurred())
	return &adminapi.Response{Status: status, Body: string(body), Header: map[string]string{
		"X-Request-Id": token, "Location": "http://" + token + "/%zz"}}
}

// gate starts a proxy that replaces any token by the rack's, and returns its address.
func (f *fixture) gate() string {
	GinkgoHelper()
	rack, err := url.Parse(f.rack.URL)
	Expect(err).NotTo(HaveOccurred())
	transport := &http.Transport{DisableKeepAlives: true}
	gate := httptest.NewServer(&httputil.ReverseProxy{Transport: transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(rack)
			r.Out.Header.Set("Authorization", "Bearer "+f.rack.Token)
		}})
	DeferCleanup(gate.Close)
	return gate.URL
}

var _ = describeController("a token that comes back", fixtureOptions{}, func(f *fixture) {
	DescribeTable("B-16 is in no status and no log", func(ctx SpecContext, status int, code string) {
		p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{"OXIDE_HOST": f.gate(),
			"OXIDE_TOKEN": strangeToken, "OXIDE_LOG_LEVEL": "debug"}})
		struck := 0
		for _, operation := range []string{"", "disk_create", "disk_view", "disk_delete",
			"disk_list", "instance_view", "instance_list", "instance_disk_attach",
			"instance_disk_detach", "instance_disk_list", "snapshot_create", "snapshot_view",
			"snapshot_delete", "snapshot_list", "project_view", "utilization_view"} {
			fired := f.strayed(ctx, p, adminapi.Fault{Operation: operation, Phase: adminapi.Before,
				Response: echoing(status, code, strangeToken)})
			if fired > 0 {
				struck++
			}
		}
		Expect(struck).To(BeNumerically(">=", 10), "so many operations are answered so")
		log, err := os.ReadFile(p.LogFile)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(log)).NotTo(ContainSubstring(harness.Canary))
		Expect(string(log)).To(ContainSubstring("***"))
	},
		Entry("B-16 of a success", 200, ""),
		Entry("B-16 of a redirect", 302, ""),
		Entry("B-16 of an error code that is the token", 400, strangeToken),
		Entry("B-16 of ObjectNotFound", 404, "ObjectNotFound"),
		Entry("B-16 of Internal", 500, "Internal"),
	)

	It("B-16 is in no status and no log after another has replaced it", func(ctx SpecContext) {
		file := filepath.Join(workDir(), "token")
		rotated(file, strangeToken+"-first")
		p := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeController,
			Env: map[string]string{
				"OXIDE_HOST": f.gate(), "OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": file,
				"OXIDE_LOG_LEVEL": "debug"}})
		for n := range 5 {
			f.fault(ctx, adminapi.Fault{Phase: adminapi.Before, Response: echoing(500, "Internal",
				strangeToken+"-first "+strangeToken+fmt.Sprint("-", n))})
			rotated(file, strangeToken+fmt.Sprint("-", n))
			_, err := p.Controller().GetCapacity(ctx, &csi.GetCapacityRequest{})
			expectRefusal(err, codes.Unavailable, "***", "Bearer")
			Expect(f.rack.Admin.ClearFaults(ctx)).To(Succeed())
		}
		log, err := os.ReadFile(p.LogFile)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(log)).NotTo(ContainSubstring(harness.Canary))
	})
})

var _ = describeController("a token file that blocks", fixtureOptions{}, func(f *fixture) {
	It("D-63 delays no call, and Probe reports it until it is a regular file again",
		func(ctx SpecContext) {
			file := filepath.Join(workDir(), "token")
			rotated(file, f.rack.Token)
			p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{
				"OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": file}})
			list := func() error {
				short, cancel := context.WithTimeout(ctx, 10*time.Second)
				defer cancel()
				return errOf(p.Controller().ListVolumes(short, &csi.ListVolumesRequest{}))
			}
			Expect(unix.Mkfifo(file+".new", 0o600)).To(Succeed())
			Expect(os.Rename(file+".new", file)).To(Succeed())
			// Another process has the pipe open and writes nothing.
			writer, err := os.OpenFile(file, os.O_RDWR, 0)
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(writer.Close)
			for range 3 {
				Expect(list()).To(Succeed(), "the last token serves on")
			}
			_, err = p.Identity().Probe(ctx, &csi.ProbeRequest{})
			expectReason(err, codes.FailedPrecondition, "TokenFileUnreadable")
			rotated(file, f.rack.Token)
			Expect(list()).To(Succeed())
			Expect(p.AwaitReady(ctx)).To(Succeed())
		})
})

// rotated writes a token into a file as a kubelet does: a new file replaces the old one.
func rotated(file, token string) {
	GinkgoHelper()
	Expect(os.WriteFile(file+".new", []byte(token+"\n"), 0o600)).To(Succeed())
	Expect(os.Rename(file+".new", file)).To(Succeed())
}

// strayed calls every RPC of the controller while a fault is active, and returns the number of
// requests that the fault struck. harness.ErrorRules checks the text of the errors.
func (f *fixture) strayed(ctx context.Context, p *harness.Plugin, fault adminapi.Fault) int {
	GinkgoHelper()
	ctl := p.Controller()
	kept, lost := f.volume(ctx), f.volume(ctx)
	node, other := f.rack.Instance("a").ID, f.rack.Instance("b").ID
	snapshot := f.snapshotted(ctx, kept)
	id, err := f.rack.Admin.AddFault(ctx, fault)
	Expect(err).NotTo(HaveOccurred())
	call := func(err error) {
		GinkgoHelper()
		Expect(codeOf(err)).NotTo(Equal(codes.DataLoss), "%v", err)
	}
	made, err := ctl.CreateVolume(ctx, harness.CreateRequest(fresh("stray")))
	call(err)
	_, err = ctl.ControllerPublishVolume(ctx, harness.PublishRequest(kept, node))
	call(err)
	_, err = ctl.ControllerPublishVolume(ctx, harness.PublishRequest(kept, other))
	call(err)
	_, err = ctl.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(kept, node))
	call(err)
	_, err = ctl.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: kept.GetVolumeId(), VolumeCapabilities: []*csi.VolumeCapability{harness.Mounted("")}})
	call(err)
	_, err = ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})
	call(err)
	_, err = ctl.GetCapacity(ctx, &csi.GetCapacityRequest{})
	call(err)
	_, err = ctl.ControllerGetVolume(ctx,
		&csi.ControllerGetVolumeRequest{VolumeId: kept.GetVolumeId()})
	call(err)
	taken, err := ctl.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: fresh("stray"), SourceVolumeId: kept.GetVolumeId()})
	call(err)
	_, err = ctl.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	call(err)
	_, err = ctl.GetSnapshot(ctx,
		&csi.GetSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
	call(err)
	restored := harness.CreateRequest(fresh("stray"))
	harness.FromSnapshot(restored, snapshot.GetSnapshotId())
	from, err := ctl.CreateVolume(ctx, restored)
	call(err)
	_, err = ctl.DeleteSnapshot(ctx,
		&csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
	call(err)
	_, err = ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: lost.GetVolumeId()})
	call(err)
	_, err = p.Identity().Probe(ctx, &csi.ProbeRequest{})
	call(err)
	fired, err := f.rack.Admin.Fired(ctx, id)
	Expect(err).NotTo(HaveOccurred())
	Expect(f.rack.Admin.ClearFaults(ctx)).To(Succeed())
	f.unpublishedLater(kept, node)
	f.unpublishedLater(kept, other)
	for _, volume := range []*csi.CreateVolumeResponse{made, from} {
		if id := volume.GetVolume().GetVolumeId(); id != "" {
			f.deletedLater(id)
		}
	}
	if id := taken.GetSnapshot().GetSnapshotId(); id != "" {
		f.snapshotDeletedLater(id)
	}
	return fired
}
