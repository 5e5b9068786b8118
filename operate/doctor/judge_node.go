package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

const (
	theReport   = "the node's report"
	theRecorder = "the node's flight recorder"
	volumeMode  = "Block" // of a volume that pods see as a device
)

// onNode returns the node's report of the volume. If the report lacks the part, onNode returns the
// link's step instead: Idle if the volume need not be on a node, otherwise Unseen.
func (c *chain) onNode(what, part string) (*inspection.Volume, *Step) {
	r, v, why := c.report()
	if v != nil {
		why = cmp.Or(inspection.WhyUnseen(r.Unseen, part), inspection.WhyUnseen(v.Unseen, part))
	}
	step := unseenStep(what, why)
	disk, asked := c.Rack.Disks[c.handle]
	switch {
	case v != nil && why == "":
		return v, nil
	case v != nil:
	case c.handle == "" && c.volumeWhy == "":
		step = Step{State: Idle, What: "none: there is no volume yet"}
	case asked && (disk.Missing() || disk.Object != nil && disk.Object.Instance == "") &&
		!c.attachedInKubernetes():
		step = Step{State: Idle, What: "none: the disk is attached to no instance"}
	case c.attachment == nil && c.attachmentWhy == "" && c.volume != nil && !asked:
		step = Step{State: Idle, What: "none: no VolumeAttachment asks for the volume"}
	}
	return nil, &step
}

func (c *chain) judgeDevice() Step {
	v, step := c.onNode("the device", inspection.PartDevices)
	if step != nil {
		return *step
	}
	r, _, _ := c.report()
	attached := c.attachedHere()
	switch {
	case v.Serial == "":
		return unseenStep("the device", "the node does not know the volume's serial number")
	case len(v.Devices) == 0 && !attached:
		return Step{State: Idle, What: "none: the disk is not attached here"}
	case len(v.Devices) == 0:
		return broken("none", *shows(csierr.DeviceNotFound, "the rack has recorded the disk as "+
			"attached, and no device of the instance has the serial %q; it has: %s", v.Serial,
			devicesText(r.Devices)))
	case len(v.Devices) > 1:
		return broken(devicesText(v.Devices), *shows(csierr.DeviceNotUnique,
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
	disk := c.Rack.Disks[c.handle].Object
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

// shows returns a finding whose source is the node's report.
func shows(reason csierr.Reason, format string, args ...any) *Finding {
	return &Finding{Reason: reason, Source: theReport, Wrong: fmt.Sprintf(format, args...),
		basis: sight}
}

// judgeDevices judges all devices of a node, for a question about the node.
func (c *chain) judgeDevices() Step {
	r, _, why := c.report()
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

// seen is a chain, with the node's report of the chain's volume.
type seen struct {
	*chain
	*inspection.Volume
}

func (s seen) raw() bool {
	return s.volume != nil && s.volume.Spec.VolumeMode == volumeMode ||
		s.volume == nil && s.Record != nil && s.Record.Block
}

func (c *chain) judgeFilesystem() Step {
	v, step := c.onNode("the filesystem", inspection.PartFilesystem)
	if step != nil {
		return *step
	}
	var result Step
	switch {
	case seen{c, v}.raw():
		return Step{State: OK, What: "none: pods see the volume as a raw device"}
	case len(v.Devices) != 1:
		return Step{State: Idle, What: "none: there is not exactly one device"}
	case len(v.Filesystems) == 0:
		result = Step{State: Waiting, What: "none that the driver makes: the disk is blank, or holds " +
			"something else"}
	case len(v.Filesystems) > 1:
		return broken(filesystemsText(v.Filesystems), *shows(csierr.DiskNotBlank,
			"the disk shows several filesystems: %s", filesystemsText(v.Filesystems)))
	default:
		result = Step{State: OK, What: filesystemsText(v.Filesystems)}
		result.Finding = seen{c, v}.filesystemFinding()
	}
	result.Notes = openNotes(v, LinkFilesystem)
	if result.State == Waiting {
		result.Finding = seen{c, v}.interrupted(LinkFilesystem)
	}
	if result.Finding == nil && result.State == Waiting && len(openAt(v, LinkFilesystem)) == 0 {
		result.Finding = vanished(v)
	}
	return result
}

// vanished returns a finding if the disk shows no filesystem any more, but had one: it is still
// mounted, or the flight recorder has recorded it.
func vanished(v *inspection.Volume) *Finding {
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

func (s seen) filesystemFinding() *Finding {
	f, d := s.Filesystems[0], s.Devices[0]
	disk := s.Rack.Disks[s.handle].Object
	i := slices.IndexFunc(s.Mounts, func(m inspection.Mount) bool { return m.Failed != "" })
	switch {
	case i >= 0:
		return shows(csierr.FilesystemFailed, "the filesystem at %q is %s", s.Mounts[i].Path,
			s.Mounts[i].Failed)
	case disk != nil && disk.FilesystemUUID != "" && f.UUID.String() != disk.FilesystemUUID:
		return shows(csierr.WrongFilesystem, "the disk holds a filesystem with the UUID %s, and the "+
			"volume's has the UUID %s", f.UUID, disk.FilesystemUUID)
	case f.SizeBytes > d.SizeBytes:
		return shows(csierr.FilesystemTooLarge, "the filesystem claims %s, and its device has %s",
			volume.SizeText(f.SizeBytes), volume.SizeText(d.SizeBytes))
	case f.Damaged && len(s.Mounts) == 0:
		return shows(csierr.FilesystemDamaged, "the checksum of the filesystem's superblock is wrong")
	case f.NotGrown:
		finding := shows(csierr.FilesystemNotGrown, "the filesystem covers %s of its disk's %s",
			volume.SizeText(f.SizeBytes), volume.SizeText(d.SizeBytes))
		finding.basis = inference // it keeps no workload from running
		return finding
	}
	return nil
}

// eventLinks contains the events of LinkMounts. All others belong to LinkFilesystem.
var eventLinks = map[flight.Event]Link{
	flight.Mounted: LinkMounts, flight.Published: LinkMounts, flight.Unpublished: LinkMounts,
	flight.Unmounted: LinkMounts,
}

// openAt returns the open changes of a link: they have begun, and no end is recorded.
func openAt(v *inspection.Volume, at Link) (open []flight.Entry) {
	for _, e := range v.Open {
		if cmp.Or(eventLinks[e.Event], LinkFilesystem) == at {
			open = append(open, e)
		}
	}
	return open
}

func openNotes(v *inspection.Volume, at Link) (notes []string) {
	for _, e := range openAt(v, at) {
		notes = append(notes, fmt.Sprintf("%s was begun at %s, and no end is recorded", e.Event,
			e.Time.Format(timeFormat)))
	}
	return notes
}

// interrupted returns a finding if a change of the link began long ago and has no recorded end.
func (s seen) interrupted(at Link) *Finding {
	for _, e := range openAt(s.Volume, at) {
		if s.At.Sub(e.Time) > grace {
			return &Finding{Wrong: fmt.Sprintf("the driver began %s and recorded no end: its process "+
				"ended, or the change still goes on", e.Event),
				Source: theRecorder, Since: e.Time,
				ByItself: "The repeated call finds what was done and goes on from there.",
				Do:       "Check whether the driver's pod was killed, and whether its tool still runs.",
				Next:     nodeLog}
		}
	}
	return nil
}

func (c *chain) judgeMounts() Step {
	v, step := c.onNode("the mounts", inspection.PartMounts)
	if step != nil {
		return *step
	}
	own, elsewhere := mountPaths(v)
	result := Step{State: OK, What: cmp.Or(strings.Join(own, ", "), "none"),
		Notes: openNotes(v, LinkMounts)}
	if len(elsewhere) > 0 {
		result.Notes = append(result.Notes, "also in "+firstOf(elsewhere))
	}
	result.Finding = seen{c, v}.mountFinding(own, elsewhere)
	if result.Finding == nil && len(own) == 0 {
		result.State = Idle
		if c.pod != nil && c.pod.Spec.NodeName != "" && !ended(*c.pod) {
			result.State, result.Finding = Waiting, seen{c, v}.interrupted(LinkMounts)
		}
	}
	return result
}

// mountPaths returns the volume's mounts in the driver's mount namespace, and those in others.
func mountPaths(v *inspection.Volume) (own, elsewhere []string) {
	for _, m := range v.Mounts {
		if m.Process == "" {
			own = append(own, fmt.Sprintf("%q", m.Path))
			continue
		}
		elsewhere = append(elsewhere, fmt.Sprintf("%q of process %s", m.Path, m.Process))
	}
	return own, elsewhere
}

func (s seen) mountFinding(own, elsewhere []string) *Finding {
	if !s.usedOnNode() && len(own)+len(elsewhere) > 0 && s.released() {
		return &Finding{Source: theReport, Reason: csierr.StillMounted, Wrong: "no pod on the node " +
			"uses the volume, and it is still mounted at " + firstOf(slices.Concat(own, elsewhere))}
	}
	for _, pod := range s.pods {
		if pod.Status.Phase != phaseRunning || pod.Spec.NodeName != s.nodeName ||
			!pod.Metadata.DeletionTimestamp.IsZero() || publishedTo(s.Volume, pod) {
			continue
		}
		finding := Finding{Source: theReport, Reason: csierr.VolumeNotAtPath,
			Wrong: fmt.Sprintf("the pod %s (%s) runs, and the volume is published to no path of it, only "+
				"to %s", pod.Metadata.Name, pod.Metadata.UID, firstOf(own)),
			Do: "Restart the pod, so that it gets the volume again."}
		if len(own) == 0 {
			finding.Reason = csierr.NotStaged
			finding.Wrong = "the pod " + pod.Metadata.Name + " runs, and the volume is mounted nowhere on " +
				"its node"
		}
		return &finding
	}
	return nil
}

// usedOnNode reports whether a pod on the node uses the volume. If the pods could not be read, one
// may use it. A pod that has ended counts until its unmount is overdue.
func (s seen) usedOnNode() bool {
	return s.podsWhy != "" || slices.ContainsFunc(s.pods, func(pod kube.Object) bool {
		stuck := ended(pod) && s.overdue(&pod) && publishedTo(s.Volume, pod)
		return pod.Spec.NodeName == s.nodeName && !stuck
	})
}

// released reports whether the node should have unmounted a volume that no pod uses: Kubernetes
// wants to detach the volume, or the last change of the volume is older than grace.
func (s seen) released() bool {
	switch {
	case s.volume == nil, s.attachment == nil && s.attachmentWhy != "":
		return false
	case s.attachment == nil, !s.attachment.Metadata.DeletionTimestamp.IsZero():
		return true
	}
	last := s.attachment.Metadata.CreationTimestamp
	for _, e := range s.Flight { // a failed unmount does not count
		if e.Outcome == flight.Done && e.Time.After(last) {
			last = e.Time
		}
	}
	return s.At.Sub(last) > grace
}

// publishedTo reports whether a mount of the volume has the pod's UID in its path.
func publishedTo(v *inspection.Volume, pod kube.Object) bool {
	return slices.ContainsFunc(v.Mounts, func(m inspection.Mount) bool {
		return strings.Contains(m.Path, pod.Metadata.UID)
	})
}
