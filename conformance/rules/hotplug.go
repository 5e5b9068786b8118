package rules

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Trial is what a rack did with the disks of a running instance that the trial created. Attaches
// was tried only on a rack that detaches none.
type Trial struct {
	Attaches, Detaches bool
	// Says are findings that an operator can send to Oxide, one sentence each.
	Says []string
}

// TryHotplug tries what a rack does with the disks of a running instance. That instance can be
// stopped at the end, unlike the one that runs this program.
func (r *TestedRack) TryHotplug(ctx context.Context) (Trial, Result) {
	var t Trial
	result := r.Run(ctx, Rule{ID: "hot-plug", Check: func(c *Check) {
		t = Trial{}
		first, second := c.Disk(), c.Disk()
		instance := c.Instance(first)
		c.StartAndAwait(instance.Id)
		_, err := c.Detach(first.Id, instance.Id)
		if t.Detaches = err == nil; t.Detaches {
			return
		}
		if !SaysNotStopped(err) {
			c.Fatalf("detach a disk of a running instance: expected that the rack does it, or refuses "+
				"because the instance is not stopped; found %s", Brief(err))
		}
		refused := Brief(err)
		_, err = c.Attach(second.Id, instance.Id)
		if IsUnanswered(err) {
			c.must("attach a disk to a running instance", err)
		}
		if err == nil {
			t.Attaches = true
			t.Says = append(t.Says, "a running instance gains a disk, and keeps it until it is stopped: "+
				refused)
			t.refusal(c, first)
		} else if says := Recorded(err, c.Look(second.Id), instance.Id); says != "" {
			t.Says = append(t.Says, says)
		}
	}})
	return t, result
}

// TryRefusal tries how the rack refuses an attach: it asks for a disk that a running instance has.
func (r *TestedRack) TryRefusal(ctx context.Context) (Trial, Result) {
	var t Trial
	result := r.Run(ctx, Rule{ID: "refusal", Check: func(c *Check) {
		t = Trial{}
		disk := c.Disk()
		c.Instance(disk)
		t.refusal(c, disk)
	}})
	return t, result
}

// refusal attaches a disk that an instance has to another one.
func (t *Trial) refusal(c *Check, attached *oxide.Disk) {
	_, err := c.Attach(attached.Id, c.StoppedInstance().Id)
	if statusOf(err) == http.StatusInternalServerError {
		t.Says = append(t.Says, "a refused attach is a 500 without a reason: the disk "+
			string(attached.Name)+" has another instance, and the answer is "+Brief(err))
	}
}

// SaysNotStopped recognizes the refusal of a rack without hot-plug (A17, A34).
func SaysNotStopped(err error) bool {
	return errors.Is(err, oxide.ErrInvalidRequest) && errors.Is(err, oxide.ErrHTTP400) &&
		strings.Contains(Brief(err), "instance is not fully stopped")
}

// Recorded describes an attach that the rack answered with an error although it now shows the disk
// as attached. It returns "" if the attach did not fail so.
func Recorded(err error, disk *oxide.Disk, instance string) string {
	attached, is := disk.State.AsAttached()
	if err == nil || IsUnanswered(err) || !is || attached.Instance != instance {
		return ""
	}
	return fmt.Sprintf("an attach that failed stays recorded: the disk %s is attached to the "+
		"instance %s, and the answer was %s", disk.Name, instance, Brief(err))
}
