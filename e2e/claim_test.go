//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

var _ = Describe("a claim that gets another disk", func() {
	It("is grown at the same time as another one: PostgreSQL on btrfs keeps its rows, and "+
		"a raw device its bytes, though the rack's quota refuses its new disk at first (D-58, D-68)",
		growsTwo, NodeTimeout(8*time.Minute))
})

// claim runs oxide-csi-plugin claim and returns what it says.
func (d doctor) claim(ctx context.Context, args ...string) string {
	out, err := d.tryClaim(ctx, args...)
	Expect(err).NotTo(HaveOccurred(), "%s", out)
	return out
}

// tryClaim runs oxide-csi-plugin claim, and returns what it says and its error.
func (d doctor) tryClaim(ctx context.Context, args ...string) (string, error) {
	cmd := d.command(ctx, append([]string{"claim"}, args...)...)
	cmd.Stderr = nil
	out, err := cmd.CombinedOutput()
	fmt.Fprintf(GinkgoWriter, "claim %v:\n%s", args, out)
	return string(out), err
}

// growsTwo grows two claims at the same time. The rack's quota has room for both snapshots, and
// besides for the smaller one of the new disks only.
func growsTwo(ctx SpecContext) {
	const room, rows, device = 4 << 30, "data-postgres-0", "/dev/data-0"
	operator := newDoctor(ctx)
	before := must(theRack.Admin.State(ctx))
	btrfs := s.Class(ctx, Class{Parameters: map[string]string{fsTypeKey: "btrfs"}})
	server := s.postgres(ctx, func(o *unstructured.Unstructured) { inGiB(o, btrfs) })
	raw := s.Claim(ctx, Claim{Block: true})
	s.app(ctx, s.podObject(ctx, &Pod{Claims: []string{raw}}).Spec)
	noise := s.appPod(ctx).Sh(ctx, writeNoise(device))
	firsts := []string{s.Bound(ctx, rows).Name, s.Bound(ctx, raw).Name}
	now := must(theRack.Admin.State(ctx))
	enough := map[string]any{"quota_bytes": must(theRack.Admin.Switches(ctx)).QuotaBytes}
	switchRack(ctx, map[string]any{"quota_bytes": now.StorageBytes + room}, enough)

	By("growing both", func() {
		type result struct {
			out string
			err error
		}
		ended := make(chan result, 1)
		go func() {
			out, err := operator.tryClaim(ctx, "grow", s.path(raw), "--size=4Gi")
			ended <- result{out, err}
		}()
		operator.claim(ctx, "grow", s.path(rows), "--size=2Gi")
		refused := <-ended
		Expect(refused.err).To(HaveOccurred())
		Expect(refused.out).To(And(ContainSubstring("1Gi (snapshot) and 4Gi (new disk)"),
			ContainSubstring("Storage Limit Exceeded"), ContainSubstring("--continue"),
			ContainSubstring("--undo")))
	})
	By("making room, and continuing", func() {
		Expect(theRack.Admin.Switch(ctx, enough)).To(Succeed())
		operator.claim(ctx, "grow", s.path(raw), "--continue")
	})
	expectRows(ctx, server)
	Expect(api.exec(ctx, s.ns, server.name, "postgres", "df", "--block-size=1",
		"--output=fstype,size", "/var/lib/postgresql/data")).To(MatchRegexp(`btrfs\s+2147483648\s`))
	p := s.appPod(ctx)
	Expect(p.Sh(ctx, readNoise(device))).To(Equal(noise))
	Expect(p.Sh(ctx, "blockdev --getsize64 "+device)).To(Equal("4294967296"))

	for i, claim := range []string{rows, raw} {
		operator.claim(ctx, "forget", s.path(claim))
		volumeGone(ctx, firsts[i])
	}
	s.OneDiskEach(ctx, before, rows, raw)
	Eventually(func() (int, error) {
		state, err := theRack.Admin.State(ctx)
		return len(state.Snapshots), err
	}).WithContext(ctx).Should(Equal(len(before.Snapshots)), "the snapshots should be gone")
}

// inGiB gives the claims of a StatefulSet a class and 1 GiB.
func inGiB(o *unstructured.Unstructured, class string) {
	if o.GetKind() != "StatefulSet" {
		return
	}
	claim := (&Claim{Class: class}).object()
	spec := must(runtime.DefaultUnstructuredConverter.ToUnstructured(&claim.Spec))
	templates, found, err := unstructured.NestedSlice(o.Object, "spec", "volumeClaimTemplates")
	Expect(err).NotTo(HaveOccurred())
	Expect(found).To(BeTrue())
	for _, template := range templates {
		template.(map[string]any)["spec"] = spec
	}
	Expect(unstructured.SetNestedSlice(o.Object, templates, "spec", "volumeClaimTemplates")).
		To(Succeed())
}
