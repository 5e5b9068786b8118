package sanity

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// maxNameLength is what csi-sanity uses to the full, and CSI grants.
const maxNameLength = 128

// withMark puts the mark before the name of every volume and snapshot that is created: csi-sanity
// has fixed names, and the rack may hold volumes of such names that are not ours.
func withMark(mark string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		// A copy, because csi-sanity sends some requests again.
		switch asked := req.(type) {
		case *csi.CreateVolumeRequest:
			marked := proto.Clone(asked).(*csi.CreateVolumeRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		case *csi.CreateSnapshotRequest:
			marked := proto.Clone(asked).(*csi.CreateSnapshotRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		}
		return invoke(ctx, method, req, reply, conn, options...)
	}
}

// markedName keeps an empty name empty, which is a mistake that csi-sanity makes on purpose, and a
// long one within the limit and distinct.
func markedName(mark, name string) string {
	if name == "" {
		return ""
	}
	marked := mark + "-" + name
	if len(marked) <= maxNameLength {
		return marked
	}
	sum := sha256.Sum256([]byte(name))
	tail := "-" + hex.EncodeToString(sum[:4])
	return marked[:maxNameLength-len(tail)] + tail
}

// carriesMark reads the description that the driver gives to its objects.
func carriesMark(description, mark string) bool {
	_, record, found := strings.Cut(description, " ")
	if !found {
		return false
	}
	var origin struct {
		Cluster string `json:"cluster"`
	}
	return json.Unmarshal([]byte(record), &origin) == nil && origin.Cluster == mark
}

// sweep deletes every snapshot and disk that carries this run's mark, and lists what it found.
func (c *conformance) sweep(ctx context.Context) (found []string, err error) {
	// A run that was interrupted is swept too.
	ctx = context.WithoutCancel(ctx)
	project := oxide.NameOrId(os.Getenv("OXIDE_PROJECT"))
	snapshots, err := c.client.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: project})
	if err != nil {
		return nil, fmt.Errorf("list snapshots to sweep: %w", brief(err))
	}
	disks, err := c.client.DiskListAllPages(ctx, oxide.DiskListParams{Project: project})
	if err != nil {
		return nil, fmt.Errorf("list disks to sweep: %w", brief(err))
	}
	var errs []error
	for _, snapshot := range snapshots {
		if carriesMark(snapshot.Description, c.mark) {
			found = append(found, "snapshot "+string(snapshot.Name))
			errs = append(errs, c.client.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{
				Snapshot: oxide.NameOrId(snapshot.Id)}))
		}
	}
	for _, disk := range disks {
		if carriesMark(disk.Description, c.mark) {
			found = append(found, "disk "+string(disk.Name))
			errs = append(errs, c.sweepDisk(ctx, disk))
		}
	}
	return found, errors.Join(errs...)
}

func (c *conformance) sweepDisk(ctx context.Context, disk oxide.Disk) error {
	if attached, is := disk.State.AsAttached(); is {
		_, err := c.client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: oxide.NameOrId(attached.Instance),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk.Id)}})
		if err != nil {
			return fmt.Errorf("sweep disk %s, which is attached to %s: %w",
				disk.Name, attached.Instance, brief(err))
		}
	}
	err := c.client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)})
	if err != nil {
		return fmt.Errorf("sweep disk %s: %w", disk.Name, brief(err))
	}
	return nil
}
