//go:build linux

package sanity

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// workDir creates a directory for the spec. Its path is short enough for a socket.
func workDir() string {
	GinkgoHelper()
	dir, err := os.MkdirTemp(theRun.Dir, "work-")
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(os.RemoveAll, dir)
	return dir
}

var _ = describeController("the token",
	fixtureOptions{rack: harness.RackOptions{Args: []string{"--token", ""}}},
	func(f *fixture) {
		It("D-63 is read again from its file, under load and without a restart",
			func(ctx SpecContext) {
				file := filepath.Join(workDir(), "token")
				rotated(file, harness.TokenPrefix+"first")
				p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{
					"OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": file,
				}})
				load, stop := context.WithCancel(ctx)
				done := make(chan error, 1)
				go func() { done <- listUntil(load, p.Controller()) }()
				for _, token := range []string{"second", "third", "fourth"} {
					rotated(file, harness.TokenPrefix+token)
					eventually(ctx, func() error {
						return errOf(p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{}))
					})
				}
				stop()
				Expect(<-done).NotTo(HaveOccurred(), "no call fails while the token is rotated")

				// A token that the rack does not know proves that the file is read again.
				rotated(file, "nobody")
				eventually(ctx, func() error {
					_, err := p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{})
					if code := codeOf(err); code != codes.Unauthenticated {
						return fmt.Errorf("a token of nobody gets %s", code)
					}
					return nil
				})
				eventually(ctx, func() error { // the check that the refusal has caused
					if err := errOf(probe(ctx, p)); codeOf(err) != codes.FailedPrecondition {
						return fmt.Errorf("Probe says %s", codeOf(err))
					}
					return nil
				})
				rotated(file, harness.TokenPrefix+"fifth")
				eventually(ctx, func() error {
					return errOf(p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{}))
				})
				Expect(p.AwaitReady(ctx)).To(Succeed())

				// Without the file the last token is used, and Probe reports it.
				Expect(os.Remove(file)).To(Succeed())
				expectOK(ctx, p.Controller().ListVolumes, &csi.ListVolumesRequest{})
				expectReason(errOf(probe(ctx, p)), codes.FailedPrecondition, "TokenFileUnreadable")
				rotated(file, harness.TokenPrefix+"sixth")
				expectOK(ctx, p.Controller().ListVolumes, &csi.ListVolumesRequest{})
				Expect(p.AwaitReady(ctx)).To(Succeed())
			})
	})

// rotated writes a token into a file as a kubelet does: a new file replaces the old one.
func rotated(file, token string) {
	GinkgoHelper()
	Expect(os.WriteFile(file+".new", []byte(token+"\n"), 0o600)).To(Succeed())
	Expect(os.Rename(file+".new", file)).To(Succeed())
}

// listUntil lists volumes again and again until the context ends, and returns the first failure.
func listUntil(ctx context.Context, ctl csi.ControllerClient) error {
	for ctx.Err() == nil {
		_, err := ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}
