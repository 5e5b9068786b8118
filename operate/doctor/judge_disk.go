package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// The rack's names for the states of disks and instances.
const (
	diskAttached = "attached"
	diskDetached = "detached"
	diskFaulted  = "faulted"

	instanceRunning = "running"
	instanceStopped = "stopped"
	instanceFailed  = "failed"
)

const (
	theRack     = "the rack"
	theReport   = "the node's report"
	theRecorder = "the node's flight recorder"
	volumeMode  = "Block" // the mode of a volume that pods see as a device
)

func ofRack(reason csierr.Reason, format string, args ...any) *Finding {
	return &Finding{Reason: reason, Source: theRack, Wrong: fmt.Sprintf(format, args...), basis: sight}
}

func (e *Evidence) judgeRack() Step {
	if e.Rack.Unseen != "" {
		return unseenStep("the rack", e.Rack.Unseen)
	}
	if e.Rack.Project == "" {
		return unseenStep("the rack", "its answer has no project")
	}
	return Step{State: OK, What: "the rack answers, project " + e.Rack.Project}
}

// judgeRackItself judges the rack if the diagnosis is about the rack alone. Unlike judgeRack, it
// reports an error of the rack as a finding, and it also judges the quota.
func (e *Evidence) judgeRackItself() Step {
	if e.Rack.Reason != "" {
		return broken("the rack", &Finding{Reason: csierr.Reason(e.Rack.Reason), Wrong: e.Rack.Unseen,
			Source: theRack})
	}
	step := e.judgeRack()
	left := e.Rack.LeftBytes
	switch {
	case step.State != OK || left.Missing():
	case left.Object == nil:
		step = unseenStep(step.What+"; what is left of the quota", left.Unseen)
	case *left.Object < volume.GiB:
		step.Finding = &Finding{Reason: csierr.RackFull, Source: theRack,
			Wrong: fmt.Sprintf("%s are left of the silo's quota, less than a volume of 1 GiB needs",
				volume.SizeText(*left.Object))}
	default:
		step.What += fmt.Sprintf(", %d GiB left of the silo's quota", *left.Object/volume.GiB)
	}
	return step
}

func (c *chain) judgeOwnDisks() Step {
	owned := c.Rack.Owned
	if owned.Object == nil {
		return unseenStep("the disks of the cluster", cmp.Or(owned.Unseen, c.Rack.Unseen,
			"the rack was not asked"))
	}
	count := map[string]int{}
	var faulted []string
	for _, d := range *owned.Object {
		count[d.State]++
		if d.State == diskFaulted {
			c.handle = cmp.Or(c.handle, d.ID)
			text := volume.NameAndID(d.Name, d.ID)
			if d.Claim != "" {
				text += " of the claim " + d.Claim
			}
			faulted = append(faulted, text)
		}
	}
	what := fmt.Sprintf("disks of the cluster %q", c.Rack.Cluster)
	if c.Rack.Cluster == "" {
		what = "disks of clusters without an id"
	}
	var states []string
	for _, state := range sortedKeys(count) {
		states = append(states, fmt.Sprintf("%d %s", count[state], state))
	}
	what += ": " + cmp.Or(strings.Join(states, ", "), "none")
	if len(faulted) > 0 {
		return broken(what, &Finding{Reason: csierr.DiskFaulted, Source: theRack,
			Wrong: fmt.Sprintf("%d disks are faulted: %s", len(faulted), firstOf(faulted))})
	}
	return Step{State: OK, What: what}
}

func (n node) judgeInstance() Step {
	found, asked := n.Rack.Instances[n.instance]
	switch {
	case n.instance == "" && n.name == "" && n.why == "":
		return Step{State: Idle, What: "none: the volume is on no node"}
	case n.instance == "" && n.csiNode != nil, n.instance == "" && n.name != "" && n.why == "":
		return unseenStep("the instance", "the driver is not registered with the node")
	case n.instance == "":
		return unseenStep("the instance", "it is not known which one it is")
	case !asked, found.Unseen != "":
		return unseenStep("the instance "+n.instance, cmp.Or(found.Unseen, n.Rack.Unseen,
			"the rack was not asked"))
	case found.Missing():
		return broken("instance "+n.instance, ofRack(csierr.InstanceNotFound, "the rack has no instance "+
			"%s, which is the node %s", n.instance, cmp.Or(n.name, "of the disk")))
	}
	i := found.Object
	if i.State == "" {
		return unseenStep("the instance "+n.instance, "the rack's answer has no state")
	}
	what := fmt.Sprintf("instance %s: %s", volume.NameAndID(i.Name, i.ID), i.State)
	switch i.State {
	case instanceFailed:
		return broken(what, ofRack(csierr.InstanceState, "the instance %s is failed",
			n.Rack.instanceText(i.ID)))
	case instanceStopped:
		f := ofRack("", "the instance %s is stopped, so nothing runs on the node",
			n.Rack.instanceText(i.ID))
		f.ByItself = cmp.Or(n.Cluster.keeperPlan(n.name), "Nothing: the driver never starts an instance.")
		f.Do = "Start it, when every disk is attached that has to be attached while it is stopped."
		f.Next = showInstance
		return broken(what, f)
	case instanceRunning:
		return Step{State: OK, What: what}
	}
	return Step{State: Waiting, What: what}
}

func (r RackObjects) instanceText(id string) string {
	if i := r.Instances[id].Object; i != nil {
		return volume.NameAndID(i.Name, id)
	}
	return id
}

// attachedHere reports whether the disk is attached to the node's instance. If the disk was not
// read from the rack, Kubernetes' VolumeAttachment decides.
func (c *chain) attachedHere() bool {
	if found, asked := c.Rack.Disks[c.handle]; asked && found.Unseen == "" {
		return found.Object != nil && found.Object.State == diskAttached &&
			(found.Object.Instance == c.node.instance || c.node.instance == "")
	}
	return isAttached(c.attachment)
}

func isAttached(attachment *kube.Object) bool {
	return attachment != nil && attachment.Status.Attached
}

func (c *chain) judgeDisk() Step {
	found, asked := c.Rack.Disks[c.handle]
	switch {
	case c.handle == "" && c.volumeWhy != "":
		return unseenStep("the disk", c.volumeWhy)
	case c.handle == "":
		return Step{State: Idle, What: "none: there is no volume yet"}
	case !asked, found.Unseen != "":
		return unseenStep("the disk "+c.handle, cmp.Or(found.Unseen, c.Rack.Unseen,
			"the rack was not asked"))
	case found.Missing():
		return broken("disk "+c.handle, ofRack(csierr.VolumeNotFound,
			"the rack has no disk %s, or the token may not see it", c.handle))
	}
	d := found.Object
	if d.Name == "" || d.State == "" || d.SizeBytes == 0 || d.BlockBytes == 0 ||
		d.State == diskAttached && d.Instance == "" {
		return unseenStep("the disk "+c.handle, "the rack's answer lacks its name, its state, its "+
			"instance, its size or the size of its blocks")
	}
	what := fmt.Sprintf("disk %s: %s", volume.NameAndID(d.Name, d.ID), d.State)
	if d.Instance != "" {
		what += " at the instance " + c.Rack.instanceText(d.Instance)
	}
	step := Step{State: OK, What: fmt.Sprintf("%s, %s in blocks of %d", what,
		volume.SizeText(d.SizeBytes), d.BlockBytes)}
	if d.Claim != "" {
		step.Notes = append(step.Notes, "made for the claim "+d.Claim)
	}
	if d.Foreign != "" {
		step.Notes = append(step.Notes, "the disk "+d.Foreign+", so this cluster's driver does not "+
			"delete it")
	}
	step.Finding = c.diskFinding(d)
	if d.State == diskDetached {
		step.State = Idle
	} else if d.State != diskAttached {
		step.State = Waiting
	}
	return step
}

func (c *chain) diskFinding(d *Disk) *Finding {
	importing := rack.ImportProblem(d.Name, oxide.DiskStateState(d.State))
	switch {
	case importing != "":
		return ofRack(csierr.DiskImporting, "%s", importing)
	case d.State == diskFaulted:
		return ofRack(csierr.DiskFaulted, "the rack reports the disk as faulted")
	case d.Instance != "" && c.node.name != "" && c.node.instance != "" &&
		d.Instance != c.node.instance && (c.attachment != nil || len(c.attachments) == 0):
		return &Finding{Reason: csierr.DiskAttachedElsewhere, Source: theRack,
			Wrong: fmt.Sprintf("the disk is %s at the instance %s, and it is wanted at the node %s, which "+
				"is the instance %s", d.State, c.Rack.instanceText(d.Instance), c.node.name,
				c.Rack.instanceText(c.node.instance))}
	case d.State == diskDetached && isAttached(c.attachment):
		return &Finding{Reason: csierr.DeviceNotFound, Source: theRack, Wrong: "VolumeAttachment " +
			c.attachment.Metadata.Name + " says that the disk is attached to the node " + c.node.name +
			", and the rack says that it is detached: somebody detached it",
			ByItself: "The attacher compares its list with the rack's from time to time, and attaches the " +
				"disk again; until then the node does not find it.",
			Do: "Find out who detached it. Restart the pods whose filesystem failed with it."}
	case d.State == diskAttached && c.attachment == nil && c.attachmentWhy == "" && c.volume != nil &&
		c.pod == nil && c.podsWhy == "":
		return &Finding{Reason: csierr.DiskAttached, Source: theRack, Wrong: "the disk is attached to " +
			"the instance " + d.Instance + ", and no VolumeAttachment asks for it",
			ByItself: "Nothing: the driver does not detach a disk that nobody asks it to detach."}
	}
	return nil
}

func (c *chain) judgeSerial() Step {
	name := c.diskName()
	disk, asked := c.Rack.Disks[c.handle]
	switch {
	case name != "":
	case c.handle == "" && c.volumeWhy == "":
		return Step{State: Idle, What: "none: there is no volume yet"}
	case disk.Missing() && c.Rack.Unseen == "" && asked:
		return Step{State: Idle, What: "none: there is no disk"}
	default:
		return unseenStep("the serial number", "the disk's name is not known")
	}
	serial := volume.Serial(name)
	step := Step{State: OK, What: "serial " + serial + ", from the disk's name"}
	if c.volume != nil {
		if says := c.volume.Spec.CSI.VolumeAttributes.DiskName; says != "" && says != name {
			step.Finding = &Finding{Reason: csierr.FieldInvalid, Source: "PersistentVolume " +
				c.volume.Metadata.Name, Wrong: fmt.Sprintf("the volume attribute diskName is %q, and the "+
				"disk's name is %q", says, name)}
			return step
		}
	}
	switch others := c.Rack.Neighbours[c.node.instance]; {
	case !c.attachedHere():
	case others.Object != nil:
		i := slices.IndexFunc(*others.Object, func(d Disk) bool {
			return d.ID != c.handle && volume.Serial(d.Name) == serial
		})
		if i >= 0 {
			taken := (*others.Object)[i]
			step.Finding = ofRack(csierr.SerialTaken, "the instance also has the disk %s, whose name "+
				"begins with the same 20 bytes", volume.NameAndID(taken.Name, taken.ID))
			return step
		}
	case asked:
		step = unseenStep("the serial numbers of the instance's other disks", cmp.Or(others.Unseen,
			"the rack did not list them"))
	}
	if v, _ := c.reported(); v != nil && v.Record != nil && volume.Serial(v.Record.Disk) != serial {
		step.Finding = shows(csierr.StagedDifferently, "the node's record says that the volume is the "+
			"disk %q", v.Record.Disk)
	}
	return step
}

// nodeView is the volume of a chain as the node's report shows it.
type nodeView struct {
	*inspection.Volume
	chain  *chain
	report *inspection.Report
}

// reported returns the volume in the node's report, or the reason why it is missing.
func (c *chain) reported() (v *nodeView, why string) {
	r, why := c.Nodes.report(c.node.instance)
	if r == nil {
		return nil, why
	}
	for i, v := range r.Volumes {
		if id, ok := volume.ParseID(v.ID); ok && id == c.handle || v.ID == c.handle {
			return &nodeView{&r.Volumes[i], c, r}, ""
		}
	}
	return nil, "the node's report is not about this volume"
}

// onNode returns a function that judges a link by the named part of the node's report. Without this
// part, the link is Unseen or, if the volume need not be on a node, Idle.
func onNode(what, part string, judge func(nodeView) Step) func(*chain) Step {
	return func(c *chain) Step {
		v, why := c.reported()
		if v != nil {
			why = cmp.Or(inspection.WhyUnseen(v.report.Unseen, part), inspection.WhyUnseen(v.Unseen, part))
		}
		disk, asked := c.Rack.Disks[c.handle]
		switch {
		case v != nil && why == "":
			return judge(*v)
		case v != nil:
		case c.handle == "" && c.volumeWhy == "":
			return Step{State: Idle, What: "none: there is no volume yet"}
		case asked && (disk.Missing() || disk.Object != nil && disk.Object.Instance == "") &&
			!isAttached(c.attachment):
			return Step{State: Idle, What: "none: the disk is attached to no instance"}
		case c.attachment == nil && c.attachmentWhy == "" && c.volume != nil && !asked:
			return Step{State: Idle, What: "none: no VolumeAttachment asks for the volume"}
		}
		return unseenStep(what, why)
	}
}

func (v nodeView) judgeDevice() Step {
	attached := v.chain.attachedHere()
	switch {
	case v.Serial == "":
		return unseenStep("the device", "the node does not know the volume's serial number")
	case len(v.Devices) == 0 && !attached:
		return Step{State: Idle, What: "none: the disk is not attached here"}
	case len(v.Devices) == 0:
		return broken("none", shows(csierr.DeviceNotFound, "the rack has recorded the disk as "+
			"attached, and no device of the instance has the serial %q; it has: %s", v.Serial,
			devicesText(v.report.Devices)))
	case len(v.Devices) > 1:
		return broken(devicesText(v.Devices), shows(csierr.DeviceNotUnique,
			"%d devices have the serial %q: %s", len(v.Devices), v.Serial, devicesText(v.Devices)))
	}
	d := v.Devices[0]
	result := Step{State: OK, What: fmt.Sprintf("%s (%s), %s", d.Name, d.Number,
		volume.SizeText(d.SizeBytes))}
	writable := slices.IndexFunc(v.Mounts, func(m inspection.Mount) bool { return m.Writable })
	if d.ReadOnly {
		result.Notes = append(result.Notes, "the device is read-only")
	}
	if why := inspection.WhyUnseen(v.Unseen, inspection.PartDevice); why != "" {
		result.Notes = append(result.Notes, "it could not be opened: "+why)
	}
	disk := v.chain.Rack.Disks[v.chain.handle].Object
	switch {
	case d.ReadOnly && writable >= 0:
		result.Finding = shows(csierr.DeviceReadOnly, "%s is read-only, and is mounted for writing at "+
			"%q: writes fail", d.Name, v.Mounts[writable].Path)
	case disk == nil, disk.SizeBytes == 0:
	case d.SizeBytes != disk.SizeBytes:
		result.Finding = shows(csierr.DeviceWrongSize, "%s has %s, and the disk has %s", d.Name,
			volume.SizeText(d.SizeBytes), volume.SizeText(disk.SizeBytes))
	case d.BlockBytes != 0 && disk.BlockBytes != 0 && d.BlockBytes != disk.BlockBytes:
		result.Finding = shows(csierr.DeviceDiffers, "%s has blocks of %d bytes, and the disk has "+
			"blocks of %d", d.Name, d.BlockBytes, disk.BlockBytes)
	}
	return result
}

func shows(reason csierr.Reason, format string, args ...any) *Finding {
	return &Finding{Reason: reason, Source: theReport, Wrong: fmt.Sprintf(format, args...),
		basis: sight}
}

func (n node) judgeDevices() Step {
	r, why := n.Nodes.report(n.instance)
	if r == nil {
		return unseenStep("the devices of the node", why)
	}
	if why := inspection.WhyUnseen(r.Unseen, inspection.PartDevices); why != "" {
		return unseenStep("the devices of the node", why)
	}
	step := Step{State: OK, What: devicesText(r.Devices)}
	seen := map[string]string{}
	for _, d := range r.Devices {
		if other, twice := seen[d.Serial]; twice {
			step.Finding = shows(csierr.DeviceNotUnique, "%s and %s both have the serial %q", other,
				d.Name, d.Serial)
		}
		seen[d.Serial] = d.Name
	}
	return step
}

func devicesText(devices []inspection.Device) string {
	words := make([]string, 0, len(devices))
	for _, d := range devices {
		words = append(words, fmt.Sprintf("%s with serial %q and %s", d.Name, d.Serial,
			volume.SizeText(d.SizeBytes)))
	}
	return cmp.Or(strings.Join(words, ", "), "none")
}

func (v nodeView) judgeFilesystem() Step {
	var result Step
	switch pv := v.chain.volume; {
	case pv != nil && pv.Spec.VolumeMode == volumeMode, pv == nil && v.Record != nil && v.Record.Block:
		return Step{State: OK, What: "none: pods see the volume as a raw device"}
	case len(v.Devices) != 1:
		return Step{State: Idle, What: "none: there is not exactly one device"}
	case len(v.Filesystems) == 0:
		result = Step{State: Waiting, What: "none that the driver makes: the disk is blank, or holds " +
			"something else", Finding: v.interrupted(LinkFilesystem)}
		if len(v.openAt(LinkFilesystem)) == 0 {
			result.Finding = v.vanished()
		}
	case len(v.Filesystems) > 1:
		return broken(filesystemsText(v.Filesystems), shows(csierr.DiskNotBlank,
			"the disk shows several filesystems: %s", filesystemsText(v.Filesystems)))
	default:
		result = Step{State: OK, What: filesystemsText(v.Filesystems), Finding: v.filesystemFinding()}
	}
	result.Notes = v.openNotes(LinkFilesystem)
	return result
}

// vanished() returns a finding if the disk shows no filesystem any more, but had one: a filesystem
// is still mounted, or the flight recorder has recorded one.
func (v nodeView) vanished() *Finding {
	const none = "the disk shows no filesystem that the driver makes, and "
	for _, m := range v.Mounts {
		if m.FSType != "" {
			return shows(csierr.FilesystemDamaged, none+"one is mounted from it at %q: its superblock was "+
				"overwritten", m.Path)
		}
	}
	for _, e := range slices.Backward(v.Flight) {
		if e.Outcome == flight.Done && (e.Event == flight.Formatted || e.Event == flight.Mounted) {
			f := shows(csierr.FilesystemDamaged, none+"%s was recorded at %s: its superblock was "+
				"overwritten since", e.Event, e.Time.Format(timeFormat))
			f.Source, f.Since = theRecorder, e.Time
			return f
		}
	}
	return nil
}

func filesystemsText(all []inspection.Filesystem) string {
	var words []string
	for _, f := range all {
		words = append(words, fmt.Sprintf("%s, UUID %s, %s", f.Type, f.UUID,
			volume.SizeText(f.SizeBytes)))
	}
	return strings.Join(words, "; ")
}

func (v nodeView) filesystemFinding() *Finding {
	f, d := v.Filesystems[0], v.Devices[0]
	disk := v.chain.Rack.Disks[v.chain.handle].Object
	i := slices.IndexFunc(v.Mounts, func(m inspection.Mount) bool { return m.Failed != "" })
	switch {
	case i >= 0:
		return shows(csierr.FilesystemFailed, "the filesystem at %q is %s", v.Mounts[i].Path,
			v.Mounts[i].Failed)
	case disk != nil && disk.FilesystemUUID != "" && f.UUID.String() != disk.FilesystemUUID:
		return shows(csierr.WrongFilesystem, "the disk holds a filesystem with the UUID %s, and the "+
			"volume's has the UUID %s", f.UUID, disk.FilesystemUUID)
	case f.SizeBytes > d.SizeBytes:
		return shows(csierr.FilesystemTooLarge, "the filesystem claims %s, and its device has %s",
			volume.SizeText(f.SizeBytes), volume.SizeText(d.SizeBytes))
	case f.Damaged && len(v.Mounts) == 0:
		return shows(csierr.FilesystemDamaged, "the checksum of the filesystem's superblock is wrong")
	case f.NotGrown:
		finding := shows(csierr.FilesystemNotGrown, "the filesystem covers %s of its disk's %s",
			volume.SizeText(f.SizeBytes), volume.SizeText(d.SizeBytes))
		finding.basis = inference // the driver's errors go first: a small filesystem stops no workload
		return finding
	}
	return nil
}

// mountEvents contains the events of LinkMounts. All others belong to LinkFilesystem.
var mountEvents = []flight.Event{flight.Mounted, flight.Published, flight.Unpublished,
	flight.Unmounted}

// openAt returns the changes of a link that have begun and whose end is not recorded.
func (v nodeView) openAt(at Link) (open []flight.Entry) {
	for _, e := range v.Open {
		if slices.Contains(mountEvents, e.Event) == (at == LinkMounts) {
			open = append(open, e)
		}
	}
	return open
}

func (v nodeView) openNotes(at Link) (notes []string) {
	for _, e := range v.openAt(at) {
		notes = append(notes, fmt.Sprintf("%s was begun at %s, and no end is recorded", e.Event,
			e.Time.Format(timeFormat)))
	}
	return notes
}

func (v nodeView) interrupted(at Link) *Finding {
	for _, e := range v.openAt(at) {
		if v.chain.At.Sub(e.Time) > grace {
			return &Finding{Wrong: fmt.Sprintf("the driver began %s and recorded no end: its process "+
				"ended, or the change still goes on", e.Event),
				Source: theRecorder, Since: e.Time, Next: nodeLog,
				ByItself: "The repeated call finds what was done and goes on from there.",
				Do:       "Check whether the driver's pod was killed, and whether its tool still runs."}
		}
	}
	return nil
}

func (v nodeView) judgeMounts() Step {
	own, elsewhere := v.mountPaths()
	result := Step{State: OK, What: cmp.Or(strings.Join(own, ", "), "none"),
		Notes: v.openNotes(LinkMounts)}
	if len(elsewhere) > 0 {
		result.Notes = append(result.Notes, "also in "+firstOf(elsewhere))
	}
	result.Finding = v.mountFinding(own, elsewhere)
	if result.Finding == nil && len(own) == 0 {
		result.State = Idle
		if pod := v.chain.pod; pod != nil && pod.Spec.NodeName != "" && !ended(*pod) {
			result.State, result.Finding = Waiting, v.interrupted(LinkMounts)
		}
	}
	return result
}

func (v nodeView) mountPaths() (own, elsewhere []string) {
	for _, m := range v.Mounts {
		if m.Process == "" {
			own = append(own, fmt.Sprintf("%q", m.Path))
			continue
		}
		elsewhere = append(elsewhere, fmt.Sprintf("%q of process %s", m.Path, m.Process))
	}
	return own, elsewhere
}

func (v nodeView) mountFinding(own, elsewhere []string) *Finding {
	if !v.usedOnNode() && len(own)+len(elsewhere) > 0 && v.released() {
		return &Finding{Source: theReport, Reason: csierr.StillMounted, Wrong: "no pod on the node " +
			"uses the volume, and it is still mounted at " + firstOf(slices.Concat(own, elsewhere))}
	}
	for _, pod := range v.chain.pods {
		if pod.Status.Phase != phaseRunning || pod.Spec.NodeName != v.chain.node.name ||
			!pod.Metadata.DeletionTimestamp.IsZero() || v.publishedTo(pod) {
			continue
		}
		finding := &Finding{Source: theReport, Reason: csierr.NotStaged, Wrong: "the pod " +
			pod.Metadata.Name + " runs, and the volume is mounted nowhere on its node",
			Do: "Restart the pod, so that it gets the volume again."}
		if len(own) > 0 {
			finding.Reason = csierr.VolumeNotAtPath
			finding.Wrong = fmt.Sprintf("the pod %s (%s) runs, and the volume is published to no path of "+
				"it, only to %s", pod.Metadata.Name, pod.Metadata.UID, firstOf(own))
		}
		return finding
	}
	return nil
}

// usedOnNode reports whether a pod on the node uses the volume. It returns true if the pods could
// not be read. A pod that has ended counts, unless its deletion waits too long for the unmount.
func (v nodeView) usedOnNode() bool {
	return v.chain.podsWhy != "" || slices.ContainsFunc(v.chain.pods, func(pod kube.Object) bool {
		stuck := ended(pod) && v.chain.overdue(&pod) && v.publishedTo(pod)
		return pod.Spec.NodeName == v.chain.node.name && !stuck
	})
}

// released() reports whether the node should have unmounted a volume that no pod uses: the
// VolumeAttachment is gone or being deleted, or the last successful change is older than grace.
func (v nodeView) released() bool {
	attachment := v.chain.attachment
	switch {
	case v.chain.volume == nil, attachment == nil && v.chain.attachmentWhy != "":
		return false
	case attachment == nil, !attachment.Metadata.DeletionTimestamp.IsZero():
		return true
	}
	last := attachment.Metadata.CreationTimestamp
	for _, e := range v.Flight { // a failed unmount does not count
		if e.Outcome == flight.Done && e.Time.After(last) {
			last = e.Time
		}
	}
	return v.chain.At.Sub(last) > grace
}

func (v nodeView) publishedTo(pod kube.Object) bool {
	return slices.ContainsFunc(v.Mounts, func(m inspection.Mount) bool {
		return strings.Contains(m.Path, pod.Metadata.UID)
	})
}
