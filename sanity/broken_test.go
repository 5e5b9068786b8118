//go:build linux

package sanity

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// brokenRack is a mutation of the rack. The driver must refuse a call because of it, with the given
// reason; otherwise it would lose data, change a foreign object, leak, or repeat a call for ever.
type brokenRack struct {
	// mutation is the mutation's name, which begins with the ID of the broken rule.
	mutation string
	// reason is the driver's reason. It is "" where CSI demands OK, which the driver must answer
	// without harm.
	reason string
	code   codes.Code
	// sentence continues "on a broken rack the driver ...".
	sentence string
	// provoke makes the calls that would do harm, and passes the refused call to refuses. It then
	// demands that nothing was harmed.
	provoke func(ctx SpecContext, r *brokenFixture)
}

// brokenFixture is a fixture on whose rack one mutation can be active.
type brokenFixture struct {
	*fixture
	broken brokenRack
	// refused counts the calls that were refused as demanded.
	refused int
}

// breaks activates the mutation. It lasts until mend is called or the spec ends.
func (r *brokenFixture) breaks(ctx context.Context) (mend func()) {
	GinkgoHelper()
	Expect(r.rack.Admin.Mutate(ctx, r.broken.mutation)).To(Succeed())
	mend = func() {
		GinkgoHelper()
		Expect(r.rack.Admin.Mend(context.WithoutCancel(ctx))).To(Succeed())
	}
	DeferCleanup(mend)
	return mend
}

// refuses demands that a call is refused while the mutation is active. Before and after the call it
// is not active.
func (r *brokenFixture) refuses(ctx context.Context, call func() error) {
	GinkgoHelper()
	mend := r.breaks(ctx)
	err := call()
	mend()
	expectReason(err, r.broken.code, r.broken.reason)
	r.refused++
}

func (f *fixture) create(ctx context.Context, req *csi.CreateVolumeRequest) error {
	return errOf(f.ctl.CreateVolume(ctx, req))
}

func (f *fixture) delete(ctx context.Context, id string) error {
	return errOf(f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}))
}

func (f *fixture) publish(ctx context.Context, volume *csi.Volume, instance string) error {
	return errOf(f.ctl.ControllerPublishVolume(ctx,
		harness.PublishRequest(volume, f.rack.Instance(instance).ID)))
}

func (f *fixture) unpublish(ctx context.Context, volume *csi.Volume, instance string) error {
	return errOf(f.ctl.ControllerUnpublishVolume(ctx,
		harness.UnpublishRequest(volume, f.rack.Instance(instance).ID)))
}

// remains demands that the volume's disk exists and is in this state.
func (f *fixture) remains(ctx context.Context, volume *csi.Volume, state string) {
	GinkgoHelper()
	Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal(state))
}

// deleteByHand deletes the disks that did not exist before, as an administrator does.
func (f *fixture) deleteByHand(ctx context.Context, before []string) {
	GinkgoHelper()
	for _, id := range f.ids(ctx) {
		if !slices.Contains(before, id) {
			Expect(f.rack.DeleteDisk(ctx, id)).To(Succeed())
		}
	}
}

// patient lets the effect of an unanswered request stay unknown for longer than a call takes, even
// on a busy machine.
var patient = fixtureOptions{plugin: harness.PluginOptions{Env: map[string]string{
	"OXIDE_LATE_LIMIT": "2s"}}}

var _ = describeController("on a broken rack the driver", patient, func(f *fixture) {
	all := slices.Concat(brokenWire, brokenDisks, brokenSnapshots, brokenAttachments)
	r := &brokenFixture{fixture: f}
	for _, broken := range all {
		It(broken.sentence+" ("+broken.mutation[:len("A00")]+")", func(ctx SpecContext) {
			r.broken = broken
			broken.provoke(ctx, r)
		}, NodeTimeout(callTimeout))
	}

	It("refuses every dangerous mutation with the reason in the list of mutations", func(
		ctx SpecContext) {
		mutations, err := f.rack.Admin.Mutations(ctx)
		Expect(err).NotTo(HaveOccurred())
		listed, known := map[string]string{}, map[string]string{}
		for _, broken := range all {
			known[broken.mutation] = broken.reason
		}
		Expect(known).To(HaveLen(len(all)), "two scenarios have one mutation")
		dangerous := 0
		for _, m := range mutations {
			if m.DriverSays != "" {
				dangerous++
			}
			if _, tried := known[m.Name]; m.DriverSays != "" || tried {
				listed[m.Name] = m.DriverSays
			}
		}
		Expect(known).To(Equal(listed), "the scenarios here and the mutations of the rack")
		Expect(proof.Print(proof.Line("broken-driver", "mutations", dangerous,
			"refused", r.refused))).To(Succeed())
	})
})
