//go:build linux

package sanity

import (
	"context"
	"os/exec"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/gbytes"
	"github.com/onsi/gomega/gexec"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// conformanceTimeout is for one or two of csi-sanity's suites.
const conformanceTimeout = 5 * time.Minute

var _ = Describe("conformance of a rack", Label("conformance"), func() {
	// program runs oxide-conformance on this rack as an operator does on a real one: all it
	// knows comes from the environment.
	program := func(ctx context.Context, rack *harness.Rack, env map[string]string, args ...string,
	) *gexec.Session {
		GinkgoHelper()
		path, err := theRun.Binary(ctx, "oxide-conformance")
		Expect(err).NotTo(HaveOccurred())
		plugin, err := theRun.Binary(ctx, "oxide-csi-plugin")
		Expect(err).NotTo(HaveOccurred())
		guest := rack.Instance("a").Guest
		all := map[string]string{
			"OXIDE_HOST": rack.URL, "OXIDE_TOKEN": rack.Token, "OXIDE_PROJECT": rack.Project,
			"OXIDE_CA_FILE":    rack.CA,
			"OXIDE_SYSFS_ROOT": filepath.Join(guest, "sys"),
			"OXIDE_DEV_ROOT":   filepath.Join(guest, "dev"),
			"OXIDE_CSI_PLUGIN": plugin, "OXIDE_SANITY_DIR": rack.Dir,
		}
		for key, value := range env {
			all[key] = value
		}
		cmd := exec.Command(path, args...)
		cmd.Env = harness.Environ()
		for key, value := range all {
			if value != "" {
				cmd.Env = append(cmd.Env, key+"="+value)
			}
		}
		session, err := gexec.Start(cmd, GinkgoWriter, GinkgoWriter)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(func() { session.Terminate().Wait(harness.StopTimeout) })
		return session
	}

	It("passes against a rack that is a separate process with a private certificate, and leaves "+
		"alone what is not its own", func(ctx SpecContext) {
		rack := startRack(ctx, harness.RackOptions{TLS: true})
		Expect(rack.CA).NotTo(BeEmpty(), "with --tls the simulator says where its CA lies")
		// A stranger's disk that has a name which csi-sanity uses, too.
		stranger := createDisk(ctx, rack, "sanity")
		mustBalance(ctx, rack)

		session := program(ctx, rack, nil)

		Eventually(ctx, session).WithTimeout(conformanceTimeout).Should(gexec.Exit(0))
		Expect(session).To(gbytes.Say(`FIGURE conformance specs=\d+ passed=\d+ failed=0`))
		seen, err := rack.Client.DiskView(ctx, oxide.DiskViewParams{
			Disk: oxide.NameOrId(stranger.Id)})
		Expect(err).NotTo(HaveOccurred())
		Expect(seen).To(Equal(stranger))
	})

	It("CP-10 runs what needs no attach on a rack that refuses hot-plug, and lists the rest",
		func(ctx SpecContext) {
			rack := startRack(ctx, harness.RackOptions{ColdPlug: true})
			mustBalance(ctx, rack)

			session := program(ctx, rack, nil, "-only", "ext4")

			Eventually(ctx, session).WithTimeout(conformanceTimeout).Should(gexec.Exit(0))
			Expect(session).To(gbytes.Say("refuses to attach a disk to a running instance"))
			Expect(session).To(gbytes.Say("volume lifecycle should work"))
			Expect(session).To(gbytes.Say(`FIGURE conformance specs=\d+ passed=\d+ failed=0`))
		})

	It("says in one line which variables are missing", func(ctx SpecContext) {
		rack := startRack(ctx, harness.RackOptions{})

		session := program(ctx, rack, map[string]string{"OXIDE_HOST": "", "OXIDE_PROJECT": ""})

		Eventually(ctx, session).WithTimeout(harness.StartTimeout).Should(gexec.Exit(1))
		Expect(string(session.Err.Contents())).To(MatchRegexp(
			`\Aoxide-conformance: [^\n]*OXIDE_HOST, OXIDE_PROJECT[^\n]*\n\z`))
		Expect(session.Out.Contents()).To(BeEmpty())
	})

	It("says in one line that the rack does not let the token in", func(ctx SpecContext) {
		rack := startRack(ctx, harness.RackOptions{})

		session := program(ctx, rack, map[string]string{"OXIDE_TOKEN": "oxide-token-stranger"})

		Eventually(ctx, session).WithTimeout(harness.StartTimeout).Should(gexec.Exit(1))
		Expect(string(session.Err.Contents())).To(MatchRegexp(
			`\Aoxide-conformance: [^\n]*OXIDE_TOKEN[^\n]*\n\z`))
		Expect(session.Err.Contents()).NotTo(ContainSubstring("oxide-token-stranger"))
	})

	It("says in one line that it does not know the rack's certificate", func(ctx SpecContext) {
		rack := startRack(ctx, harness.RackOptions{TLS: true})

		session := program(ctx, rack, map[string]string{"OXIDE_CA_FILE": ""})

		Eventually(ctx, session).WithTimeout(harness.StartTimeout).Should(gexec.Exit(1))
		Expect(string(session.Err.Contents())).To(MatchRegexp(
			`\Aoxide-conformance: [^\n]*OXIDE_CA_FILE[^\n]*\n\z`))
	})

	It("says in one line that it cannot see the project", func(ctx SpecContext) {
		rack := startRack(ctx, harness.RackOptions{})

		session := program(ctx, rack, map[string]string{"OXIDE_PROJECT": "elsewhere"})

		Eventually(ctx, session).WithTimeout(harness.StartTimeout).Should(gexec.Exit(1))
		Expect(string(session.Err.Contents())).To(MatchRegexp(
			`\Aoxide-conformance: [^\n]*OXIDE_PROJECT[^\n]*not found[^\n]*\n\z`))
	})
})

// createDisk makes a blank disk of 1 GiB that is none of the driver's.
func createDisk(ctx context.Context, rack *harness.Rack, name string) *oxide.Disk {
	GinkgoHelper()
	disk, err := rack.CreateDisk(ctx, rack.Project, name, harness.GiB)
	Expect(err).NotTo(HaveOccurred())
	seen, err := rack.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Id)})
	Expect(err).NotTo(HaveOccurred())
	return seen
}
