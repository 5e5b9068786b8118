package claim

import (
	"context"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// peak returns how much of the rack's quota a change needs in addition, until it is forgotten. A
// snapshot counts with the whole size of its disk.
func (p plan) peak() (sizeBytes int64, text string) {
	sizeBytes, _ = parseSize(p.Size)
	sizeBytes += (volume.GiB - sizeBytes%volume.GiB) % volume.GiB // disks have whole GiB
	if p.SnapshotClass == "" {
		return sizeBytes, p.Size + " (new disk)"
	}
	snapshotBytes, _ := parseSize(p.OldSize)
	return sizeBytes + snapshotBytes, p.OldSize + " (snapshot) and " + p.Size + " (new disk)"
}

// checkQuota compares what the change needs with the capacity that the cluster publishes for the
// claim's StorageClass. Without one the quota is not checked, and the plan says so.
//
// A published capacity has no time, and it is updated with a delay, or never while the rack refuses
// the provisioner. So a capacity that is too small is refused, and a person who knows better sets a
// flag. A margin would not help: a quota that was just enlarged may differ by any amount.
func (r *run) checkQuota(ctx context.Context, claim, _ object, p *plan) error {
	class := claim.str("spec", "storageClassName")
	best, left, err := r.published(ctx, class, p.Node)
	switch {
	case err != nil:
		r.quota = fmt.Sprintf("This is not checked: the published capacities cannot be read (%v).", err)
		return ctx.Err()
	case best == nil:
		r.quota = fmt.Sprintf("This is not checked: the cluster publishes no capacity of StorageClass "+
			"%s.", class)
		return nil
	}
	object := fmt.Sprintf("CSIStorageCapacity %s/%s of StorageClass %s",
		best.str("metadata", "namespace"), best.name(), class)
	need, parts := p.peak()
	size, _ := parseSize(p.Size)
	most, err := parseQuantity(best.str("maximumVolumeSize"))
	limited := err == nil && size > most
	var problem string
	switch {
	case need > left:
		problem = fmt.Sprintf("expected room for %s in the rack's quota (%s), found %s left, by %s. Ask "+
			"for quota, or remove snapshots and disks that nobody needs", volume.SizeText(need), parts,
			volume.SizeText(left), object)
	case limited:
		problem = fmt.Sprintf("--size: expected a disk of at most %s, by %s, and %s is asked for",
			volume.SizeText(most), object, p.Size)
	default:
		r.quota = fmt.Sprintf("%s is left, by %s.", volume.SizeText(left), object)
		return nil
	}
	if r.IgnoreCapacity {
		r.quota = "Continued by --ignore-capacity: " + problem + "."
		return nil
	}
	return fmt.Errorf("%s. Nothing has been changed. The object follows the rack with a delay, a "+
		"minute by default: if there is room now, repeat the command later, or with --ignore-capacity",
		problem)
}

// published returns the CSIStorageCapacity of a class with the most capacity, and its capacity, or
// nil. If the disk is made near a node, it considers only those whose topology contains the node.
func (r *run) published(ctx context.Context, class, node string) (best object, left int64,
	err error) {
	all, err := r.all(ctx, "csistoragecapacities.storage.k8s.io", "", "--all-namespaces")
	if err != nil {
		return nil, 0, err
	}
	var near object
	if node != "" {
		if near, err = r.get(ctx, "nodes", "", node); err != nil {
			return nil, 0, err
		}
	}
	for _, o := range all {
		if o.str("storageClassName") != class || near != nil && !o.reaches(near) {
			continue
		}
		// The API allows an object without a capacity: it is not known at the moment.
		if n, err := parseQuantity(o.str("capacity")); err == nil && (best == nil || n > left) {
			best, left = o, n
		}
	}
	return best, left, nil
}

// reaches reports whether a node may be in the topology of a CSIStorageCapacity. The provisioner
// writes labels. Expressions, which others may write, count as a match: then nothing is refused by
// mistake.
func (o object) reaches(node object) bool {
	if o.at("nodeTopology") == nil {
		return false // it is accessible from no node
	}
	labels, _ := o.at("nodeTopology", "matchLabels").(map[string]any)
	for key, value := range labels {
		if node.at("metadata", "labels", key) != value {
			return false
		}
	}
	return true
}
