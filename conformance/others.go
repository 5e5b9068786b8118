package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
)

// meet notes the disks of an instance that the run may stop, and demands that nobody else uses it.
func (w *job) meet(ctx context.Context, instance *oxide.Instance) error {
	disks, err := w.disksOf(ctx, instance.Id)
	if err != nil {
		return err
	}
	if w.known == nil {
		w.known = map[string]bool{}
	}
	for _, d := range disks {
		w.known[d.Id] = true
	}
	return w.mayStop(ctx, instance.Id)
}

// mayStop returns an error unless the rack shows now that nobody else uses an instance: it is of
// the project, no other run has made or named it, and no disk of another run or of a cluster is
// attached to it, nor any that came since the preflight.
func (w *job) mayStop(ctx context.Context, id string) error {
	instance, err := w.find(ctx, id)
	if err != nil {
		return err
	}
	left := func(format string, args ...any) error {
		return fmt.Errorf("instance %s was left as it is: %s", instance.Name,
			fmt.Sprintf(format, args...))
	}
	if isMark(instance.Description) {
		return left("a run has made it")
	}
	attached, err := w.disksOf(ctx, id)
	if err != nil {
		return err
	}
	for _, d := range attached {
		run, of := runOf(d.Description)
		switch {
		case of && (run == w.id || w.dead[run]):
		case of:
			return left("the disk %s of run %s is attached to it", d.Name, run)
		case strings.HasPrefix(d.Description, driverWord):
			return left("the volume %s of a cluster is attached to it", d.Name)
		case d.Id != instance.BootDiskId && !w.known[d.Id]:
			return left("the disk %s, which is not the run's, is attached to it", d.Name)
		}
	}
	all, err := w.client.DiskListAllPages(ctx, oxide.DiskListParams{Project: w.projectName})
	if err != nil {
		return fmt.Errorf("list the project's disks: %s", rules.Brief(err))
	}
	for _, d := range all {
		if m, is := parseMark(d.Description); is && m.Run != w.id && !w.dead[m.Run] &&
			slices.Contains(m.Instances, id) {
			return left("run %s on %s uses it; if that has ended: oxide-conformance clean --run %s",
				m.Run, m.Host, m.Run)
		}
	}
	return nil
}

func (w *job) disksOf(ctx context.Context, instance string) ([]oxide.Disk, error) {
	disks, err := w.client.InstanceDiskListAllPages(ctx,
		oxide.InstanceDiskListParams{Instance: oxide.NameOrId(instance)})
	if err != nil {
		return nil, fmt.Errorf("list the disks of instance %s: %s", instance, rules.Brief(err))
	}
	return disks, nil
}
