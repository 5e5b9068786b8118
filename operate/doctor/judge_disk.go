package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
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

const theRack = "the rack"

// ofRack returns a finding whose source is the rack.
func ofRack(reason csierr.Reason, format string, args ...any) Finding {
	return Finding{Reason: reason, Source: theRack, Wrong: fmt.Sprintf(format, args...), basis: sight}
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

// judgeRackItself judges the rack if the question is about it. An error of the rack is a finding.
func (e *Evidence) judgeRackItself() Step {
	if e.Rack.Reason != "" {
		return broken("the rack", Finding{Reason: csierr.Reason(e.Rack.Reason), Wrong: e.Rack.Unseen,
			Source: theRack})
	}
	step := e.judgeRack()
	left := e.Rack.LeftBytes
	switch {
	case step.State != OK || left == nil:
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
	if owned == nil || owned.Object == nil {
		why := c.Rack.Unseen
		if owned != nil {
			why = owned.Unseen
		}
		return unseenStep("the disks of the cluster", cmp.Or(why, "the rack was not asked"))
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
		return broken(what, Finding{Reason: csierr.DiskFaulted, Source: theRack,
			Wrong: fmt.Sprintf("%d disks are faulted: %s", len(faulted), firstOf(faulted))})
	}
	return Step{State: OK, What: what}
}

func (c *chain) judgeInstance() Step {
	found, asked := c.Rack.Instances[c.instance]
	switch {
	case c.instance == "" && c.nodeName == "" && c.nodeWhy == "":
		return Step{State: Idle, What: "none: the volume is on no node"}
	case c.instance == "" && c.csiNode != nil, c.instance == "" && c.nodeName != "" && c.nodeWhy == "":
		return unseenStep("the instance", "the driver is not registered with the node")
	case c.instance == "":
		return unseenStep("the instance", "it is not known which one it is")
	case !asked, found.Unseen != "":
		return unseenStep("the instance "+c.instance, cmp.Or(found.Unseen, c.Rack.Unseen,
			"the rack was not asked"))
	case found.Missing():
		return broken("instance "+c.instance, ofRack(csierr.InstanceNotFound, "the rack has no instance "+
			"%s, which is the node %s", c.instance, cmp.Or(c.nodeName, "of the disk")))
	}
	i := found.Object
	if i.State == "" {
		return unseenStep("the instance "+c.instance, "the rack's answer has no state")
	}
	what := fmt.Sprintf("instance %s: %s", volume.NameAndID(i.Name, i.ID), i.State)
	switch i.State {
	case instanceFailed:
		return broken(what, ofRack(csierr.InstanceState, "the instance %s is failed",
			c.instanceText(i.ID)))
	case instanceStopped:
		f := ofRack("", "the instance %s is stopped, so nothing runs on the node", c.instanceText(i.ID))
		f.ByItself = cmp.Or(c.keeperPlan(c.nodeName), "Nothing: the driver never starts an instance.")
		f.Do = "Start it, when every disk is attached that has to be attached while it is stopped."
		f.Next = showInstance
		return broken(what, f)
	case instanceRunning:
		return Step{State: OK, What: what}
	}
	return Step{State: Waiting, What: what}
}

// instanceText returns the id of an instance and, if the rack has shown it, the name.
func (e *Evidence) instanceText(id string) string {
	if i := e.Rack.Instances[id].Object; i != nil {
		return volume.NameAndID(i.Name, id)
	}
	return id
}

// attachedHere reports whether the disk is attached to the node's instance. The rack decides that
// or, if the disk was not read from the rack, Kubernetes.
func (c *chain) attachedHere() bool {
	if found, asked := c.Rack.Disks[c.handle]; asked && found.Unseen == "" {
		return found.Object != nil && found.Object.State == diskAttached &&
			(found.Object.Instance == c.instance || c.instance == "")
	}
	return c.attachedInKubernetes()
}

func (c *chain) attachedInKubernetes() bool {
	return c.attachment != nil && c.attachment.Status.Attached
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
		what += " at the instance " + c.instanceText(d.Instance)
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
	switch {
	case step.Finding != nil:
	case d.State != diskAttached && d.State != diskDetached:
		step.State = Waiting
	case d.State == diskDetached:
		step.State = Idle
	}
	return step
}

func (c *chain) diskFinding(d *Disk) *Finding {
	finding := Finding{Source: theRack}
	importing := rack.ImportProblem(d.Name, oxide.DiskStateState(d.State))
	switch {
	case importing != "":
		finding = ofRack(csierr.DiskImporting, "%s", importing)
	case d.State == diskFaulted:
		finding = ofRack(csierr.DiskFaulted, "the rack reports the disk as faulted")
	case d.Instance != "" && c.nodeName != "" && c.instance != "" && d.Instance != c.instance &&
		(c.attachment != nil || len(c.attachments) == 0):
		finding.Reason = csierr.DiskAttachedElsewhere
		finding.Wrong = fmt.Sprintf("the disk is %s at the instance %s, and it is wanted at the node "+
			"%s, which is the instance %s", d.State, c.instanceText(d.Instance), c.nodeName,
			c.instanceText(c.instance))
	case d.State == diskDetached && c.attachedInKubernetes():
		finding.Reason = csierr.DeviceNotFound
		finding.Wrong = "VolumeAttachment " + c.attachment.Metadata.Name + " says that the disk is " +
			"attached to the node " + c.nodeName + ", and the rack says that it is detached: somebody " +
			"detached it"
		finding.ByItself = "The attacher compares its list with the rack's from time to time, and " +
			"attaches the disk again; until then the node does not find it."
		finding.Do = "Find out who detached it. Restart the pods whose filesystem failed with it."
	case d.State == diskAttached && c.attachment == nil && c.attachmentWhy == "" && c.volume != nil &&
		c.pod == nil && c.podsWhy == "":
		finding.Reason = csierr.DiskAttached
		finding.Wrong = "the disk is attached to the instance " + d.Instance + ", and no " +
			"VolumeAttachment asks for it"
		finding.ByItself = "Nothing: the driver does not detach a disk that nobody asks it to detach."
	default:
		return nil
	}
	return &finding
}

func (c *chain) judgeSerial() Step {
	name := c.diskName()
	disk, asked := c.Rack.Disks[c.handle]
	if name == "" {
		switch {
		case c.handle == "" && c.volumeWhy == "":
			return Step{State: Idle, What: "none: there is no volume yet"}
		case disk.Missing() && c.Rack.Unseen == "" && asked:
			return Step{State: Idle, What: "none: there is no disk"}
		}
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
	if others := c.Rack.Neighbours[c.instance].Object; others != nil && c.attachedHere() {
		i := slices.IndexFunc(*others, func(d Disk) bool {
			return d.ID != c.handle && volume.Serial(d.Name) == serial
		})
		if i >= 0 {
			taken := ofRack(csierr.SerialTaken, "the instance also has the disk %s, whose name begins with "+
				"the same 20 bytes", volume.NameAndID((*others)[i].Name, (*others)[i].ID))
			step.Finding = &taken
			return step
		}
	}
	if others := c.Rack.Neighbours[c.instance]; others.Object == nil && asked && c.attachedHere() {
		step = unseenStep("the serial numbers of the instance's other disks", cmp.Or(others.Unseen,
			"the rack did not list them"))
	}
	if _, v, _ := c.report(); v != nil && v.Record != nil && volume.Serial(v.Record.Disk) != serial {
		step.Finding = shows(csierr.StagedDifferently, "the node's record says that the volume is the "+
			"disk %q", v.Record.Disk)
	}
	return step
}
