//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// The rack's names in deploy/kustomize/simulator.
const (
	rackAPIPort   = 12225
	rackAdminPort = 12226
	rackProject   = "default"
	rackToken     = "oxide-token-e2e"
)

// rackClients accesses the simulated rack from outside, with Oxide's own client and the admin
// listener.
type rackClients struct {
	*oxide.Client
	Admin adminapi.Client
}

// newRackClients connects to the rack at the address of the control plane, whose network its pod
// uses.
func newRackClients(n node) (*rackClients, error) {
	address, _, err := n.IP()
	if err != nil {
		return nil, fmt.Errorf("find the rack's address: %w", err)
	}
	client, err := oxide.NewClient(
		oxide.WithHost(fmt.Sprintf("http://%s:%d", address, rackAPIPort)),
		oxide.WithToken(rackToken),
		oxide.WithHTTPClient(&http.Client{
			Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute,
		}))
	if err != nil {
		return nil, fmt.Errorf("speak to the rack: %w", err)
	}
	admin := adminapi.Client{URL: fmt.Sprintf("http://%s:%d", address, rackAdminPort)}
	return &rackClients{Client: client, Admin: admin}, nil
}

// attachedTo returns the name of the node whose instance has the disk, or "".
func (r *rackClients) attachedTo(ctx context.Context, diskID string) (string, error) {
	state, err := r.Admin.State(ctx)
	if err != nil {
		return "", err
	}
	for _, a := range state.Attachments {
		if a.DiskID != diskID {
			continue
		}
		for worker, id := range instanceIDs {
			if id == a.InstanceID {
				return worker, nil
			}
		}
		return a.InstanceID, nil
	}
	return "", nil
}

// diskByHand creates a blank disk that is deleted when the spec ends, and returns its UUID.
func (f *fixture) diskByHand(ctx context.Context, name string, giB int) string {
	disk := must(theRack.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: rackProject,
		Body: &oxide.DiskCreate{
			Name: oxide.Name(name), Description: "made by hand",
			Size: oxide.ByteCount(giB << 30),
			DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}},
			}},
		},
	}))
	f.diskRemovedLater(disk.Id)
	return disk.Id
}

// diskRemovedLater deletes a disk when the spec ends.
func (f *fixture) diskRemovedLater(id string) {
	f.atEnd(func(ctx context.Context) {
		worker := must(theRack.attachedTo(ctx, id))
		if worker != "" {
			detachByHand(ctx, id, worker)
		}
		if theRack.hasDisk(ctx, id) {
			Expect(theRack.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)})).
				To(Succeed())
		}
	})
}

// hasDisk reports whether a disk with this UUID exists.
func (r *rackClients) hasDisk(ctx context.Context, id string) bool {
	return slices.Contains(r.diskIDs(ctx), id)
}

// diskIDs returns the UUIDs of all disks.
func (r *rackClients) diskIDs(ctx context.Context) []string {
	state := must(r.Admin.State(ctx))
	ids := []string{}
	for _, d := range state.Disks {
		ids = append(ids, d.ID)
	}
	return ids
}

// disk returns a disk from the rack's API.
func (r *rackClients) disk(ctx context.Context, id string) *oxide.Disk {
	return must(r.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(id)}))
}

func attachByHand(ctx context.Context, disk, worker string) {
	must(theRack.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instanceIDs[worker]),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	}))
}

func detachByHand(ctx context.Context, disk, worker string) {
	must(theRack.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instanceIDs[worker]),
		Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)},
	}))
}
