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

// brokenRack is a mutation of the rack that breaks one of its rules. The driver must refuse to
// continue, with the given reason, because it would lose data, touch a foreign object, leak, or
// repeat a call for ever.
type brokenRack struct {
	// mutation is the mutation's name on the rack's admin listener.
	mutation string
	// reason is the driver's reason. It is "" where CSI demands OK, which the driver must reach
	// without harm.
	reason string
	code   codes.Code
	// says continues the sentence "a broken rack ...".
	says string
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

// breaks activates the mutation until the spec ends or mend is called.
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

// refuses demands that a call is refused while the rack is broken. The rack is in order before
// and after.
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

// On a busy machine, too, the time of an open change has to be longer than a call.
var patient = fixtureOptions{plugin: harness.PluginOptions{Env: map[string]string{
	"OXIDE_LATE_LIMIT": "2s"}}}

var _ = describeController("a broken rack", patient, func(f *fixture) {
	all := slices.Concat(brokenWire, brokenDisks, brokenSnapshots, brokenAttachments)
	r := &brokenFixture{fixture: f}
	for _, broken := range all {
		It(broken.says, func(ctx SpecContext) {
			r.broken = broken
			broken.provoke(ctx, r)
		}, NodeTimeout(callTimeout))
	}

	It("is refused by the driver in every way that endangers it, with the reason that the rack's "+
		"list of mutations gives", func(ctx SpecContext) {
		mutations, err := f.rack.Admin.Mutations(ctx)
		Expect(err).NotTo(HaveOccurred())
		listed, known := map[string]string{}, map[string]string{}
		for _, broken := range all {
			known[broken.mutation] = broken.reason
			Expect(broken.says).To(HavePrefix(broken.mutation[:len("A00")]+" "), broken.mutation)
		}
		Expect(known).To(HaveLen(len(all)), "two scenarios have one mutation")
		endangering := 0
		for _, m := range mutations {
			if m.DriverSays != "" {
				endangering++
			}
			if _, harmless := known[m.Name]; m.DriverSays != "" || harmless {
				listed[m.Name] = m.DriverSays
			}
		}
		Expect(known).To(Equal(listed), "the scenarios here and the mutations of the rack")
		Expect(proof.Print(proof.Line("broken-driver", "mutations", endangering,
			"refused", r.refused))).To(Succeed())
	})
})
