//go:build linux

package sanity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// failFast limits how long a misconfigured driver takes to report the mistake and end. A build
// with the race detector starts several times slower than the real one.
func failFast() time.Duration {
	if harness.RaceDetector {
		return 5 * time.Second
	}
	return time.Second
}

// controllerEnv and nodeEnv are complete configurations for a rack that is never called.
func controllerEnv(dir string) map[string]string {
	return map[string]string{
		"OXIDE_MODE": harness.ModeController, "CSI_ENDPOINT": "unix://" + filepath.Join(dir, "csi.sock"),
		"OXIDE_HOST": "http://127.0.0.1:9", "OXIDE_TOKEN": harness.TokenPrefix + harness.Canary,
		"OXIDE_PROJECT": "sanity",
	}
}

func nodeEnv(dir string) map[string]string {
	return map[string]string{
		"OXIDE_MODE": harness.ModeNode, "CSI_ENDPOINT": "unix://" + filepath.Join(dir, "csi.sock"),
		"OXIDE_INSTANCE_ID": someUUID,
		// The sysfs is empty, so that the machine that runs this is no instance.
		"OXIDE_SYSFS_ROOT": sysfsOf(dir),
		"OXIDE_STATE_DIR":  stateDirOf(dir),
	}
}

// sysfsOf returns an empty directory next to dir, in which the driver finds no sysfs.
func sysfsOf(dir string) string {
	GinkgoHelper()
	sysfs := dir + "-sys"
	Expect(os.MkdirAll(sysfs, 0o755)).To(Succeed())
	DeferCleanup(os.RemoveAll, sysfs)
	return sysfs
}

// stateDirOf returns a directory in which a driver can create its state directory.
func stateDirOf(dir string) string {
	GinkgoHelper()
	DeferCleanup(os.RemoveAll, dir+"-state")
	return dir + "-state"
}

// driverCommand returns a command that runs the driver with exactly that environment and the
// machine's PATH.
func driverCommand(ctx context.Context, env map[string]string, args ...string) *exec.Cmd {
	GinkgoHelper()
	path, err := theRun.Binary(ctx, "oxide-csi-plugin")
	Expect(err).NotTo(HaveOccurred())
	cmd := exec.CommandContext(ctx, path, args...)
	// The race detector waits a second before it ends a process, unless it is configured not to.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=0"}
	for key, value := range env {
		cmd.Env = append(cmd.Env, key+"="+value)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// expectMisconfigured runs the driver. The driver must end at once with exit code 1 and one line
// that contains the words but not the secret.
func expectMisconfigured(ctx context.Context, env map[string]string, words ...string) {
	GinkgoHelper()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := driverCommand(ctx, env)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	start := time.Now()
	err := cmd.Run()
	took := time.Since(start)
	var exit *exec.ExitError
	Expect(errors.As(err, &exit)).To(BeTrue(), "the driver must fail with %v: %v", env, err)
	Expect(exit.ExitCode()).To(Equal(1), "%s", stderr.String())
	Expect(took).To(BeNumerically("<", failFast()), "%s", stderr.String())
	Expect(stdout.String()).To(BeEmpty())
	said := strings.TrimSuffix(stderr.String(), "\n")
	Expect(said).NotTo(BeEmpty())
	Expect(said).NotTo(ContainSubstring("\n"), "one line is enough")
	for _, word := range words {
		Expect(said).To(ContainSubstring(word))
	}
	Expect(said).NotTo(ContainSubstring(harness.Canary), "a value may be a secret")
}

// workDir creates a directory for the spec. Its path is short enough for a socket.
func workDir() string {
	GinkgoHelper()
	dir, err := os.MkdirTemp(theRun.Dir, "work-")
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(os.RemoveAll, dir)
	return dir
}

// The driver's own tests have the table of wrong settings.
var _ = Describe("a misconfigured driver", func() {
	DescribeTable("B-26 ends at once with exit code 1 and one line that names the variable",
		func(ctx SpecContext, base func(dir string) map[string]string, variable, value string,
			words ...string) {
			dir := workDir()
			env := base(dir)
			env[variable] = value
			expectMisconfigured(ctx, env, append(words, variable)...)
			Expect(filepath.Join(dir, "csi.sock")).NotTo(BeAnExistingFile())
		},
		Entry("B-28 an unknown mode", controllerEnv, "OXIDE_MODE", "both-"+harness.Canary,
			"controller", "node", "all"),
		Entry("B-17 B-18 an endpoint that is not a UNIX socket", controllerEnv, "CSI_ENDPOINT",
			"tcp://127.0.0.1:10000"),
		Entry("B-26 a CA file without a certificate", controllerEnv, "OXIDE_CA_FILE", "/dev/null"),
		Entry("NI-4 D-64 no instance ID on a machine that is no instance", nodeEnv,
			"OXIDE_INSTANCE_ID", ""),
		Entry("D-67 a metadata file without the ID", func(dir string) map[string]string {
			env := nodeEnv(dir)
			delete(env, "OXIDE_INSTANCE_ID")
			return env
		}, "OXIDE_INSTANCE_METADATA_FILE", "/dev/null"),
		Entry("B-26 a state directory that cannot be made", nodeEnv, "OXIDE_STATE_DIR",
			"/dev/null/"+harness.Canary),
	)
})

// started runs the driver with the spec's environment and waits until it serves.
func started(ctx context.Context, dir string, env map[string]string) *exec.Cmd {
	GinkgoHelper()
	cmd := driverCommand(context.WithoutCancel(ctx), env)
	cmd.Stderr = GinkgoWriter
	Expect(cmd.Start()).To(Succeed())
	DeferCleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	eventually(ctx, func() error { return answers(ctx, filepath.Join(dir, "csi.sock")) })
	return cmd
}

// answers returns nil if a driver answers at the socket.
func answers(ctx context.Context, socket string) error {
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return errOf(csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}))
}

// inDir lists a directory.
func inDir(dir string) []string {
	GinkgoHelper()
	entries, err := os.ReadDir(dir)
	Expect(err).NotTo(HaveOccurred())
	names := []string{}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

var _ = Describe("the driver's process", func() {
	It("B-19 B-22 has a socket for its owner and group, and leaves nothing when it ends",
		func(ctx SpecContext) {
			dir := workDir()
			cmd := started(ctx, dir, nodeEnv(dir))
			Expect(inDir(dir)).To(ConsistOf("csi.sock"))
			info, err := os.Stat(filepath.Join(dir, "csi.sock"))
			Expect(err).NotTo(HaveOccurred())
			Expect(info.Mode().Perm() & 0o007).To(BeZero())
			Expect(cmd.Process.Signal(syscall.SIGTERM)).To(Succeed())
			Expect(cmd.Wait()).To(Succeed())
			Expect(inDir(dir)).To(BeEmpty())
		})

	It("B-19 takes over the socket of a process that was killed", func(ctx SpecContext) {
		dir := workDir()
		cmd := started(ctx, dir, nodeEnv(dir))
		Expect(cmd.Process.Kill()).To(Succeed())
		Expect(cmd.Wait()).NotTo(Succeed())
		Expect(inDir(dir)).To(ConsistOf("csi.sock"))
		started(ctx, dir, nodeEnv(dir))
		Expect(inDir(dir)).To(ConsistOf("csi.sock"))
	})

	It("B-19 does not take a socket at which another process answers", func(ctx SpecContext) {
		dir := workDir()
		started(ctx, dir, nodeEnv(dir))
		expectMisconfigured(ctx, nodeEnv(dir), "CSI_ENDPOINT")
		Expect(answers(ctx, filepath.Join(dir, "csi.sock"))).To(Succeed())
	})

	It("B-19 does not take a socket at which another process listens without an answer",
		func(ctx SpecContext) {
			dir := workDir()
			listener, err := net.Listen("unix", filepath.Join(dir, "csi.sock"))
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(listener.Close)
			expectMisconfigured(ctx, nodeEnv(dir), "CSI_ENDPOINT")
			Expect(inDir(dir)).To(ConsistOf("csi.sock"))
		})

	It("B-30 logs to its standard error and to nothing else", func(ctx SpecContext) {
		dir := workDir()
		env := nodeEnv(dir)
		env["OXIDE_LOG_LEVEL"], env["HOME"], env["TMPDIR"] = "debug", dir, dir
		cmd := driverCommand(context.WithoutCancel(ctx), env)
		cmd.Dir = dir
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		Expect(cmd.Start()).To(Succeed())
		eventually(ctx, func() error { return answers(ctx, filepath.Join(dir, "csi.sock")) })
		Expect(inDir(dir)).To(ConsistOf("csi.sock"))
		Expect(cmd.Process.Signal(syscall.SIGTERM)).To(Succeed())
		Expect(cmd.Wait()).To(Succeed())
		Expect(stdout.String()).To(BeEmpty())
		Expect(stderr.String()).NotTo(BeEmpty())
	})

	It("B-23 gives a flag precedence over its variable", func(ctx SpecContext) {
		dir := workDir()
		env := nodeEnv(dir)
		env["OXIDE_MODE"], env["CSI_ENDPOINT"] = "neither", "unix:///elsewhere/csi.sock"
		cmd := driverCommand(context.WithoutCancel(ctx), env,
			"--mode=node", "--endpoint=unix://"+filepath.Join(dir, "csi.sock"))
		cmd.Stderr = GinkgoWriter
		Expect(cmd.Start()).To(Succeed())
		eventually(ctx, func() error { return answers(ctx, filepath.Join(dir, "csi.sock")) })
		Expect(cmd.Process.Signal(syscall.SIGTERM)).To(Succeed())
		Expect(cmd.Wait()).To(Succeed())
	})

	It("GI-3 knows its version when it starts", func(ctx SpecContext) {
		version, err := driverCommand(ctx, nil, "--version").Output()
		Expect(err).NotTo(HaveOccurred())
		Expect(strings.TrimSpace(string(version))).NotTo(BeEmpty())
	})
})

var _ = describeController("the end of the driver's process", fixtureOptions{}, func(f *fixture) {
	It("B-29 finishes running calls at SIGTERM, accepts no new ones, and exits with 0",
		func(ctx SpecContext) {
			p := f.controller(ctx, harness.PluginOptions{})
			f.switched(ctx, "create_hold", "1s", "0s")
			ctl := p.Controller()
			create := inBackground(func() (*csi.CreateVolumeResponse, error) {
				return ctl.CreateVolume(ctx, harness.CreateRequest(fresh("drained")))
			})
			f.awaitDisk(ctx, "creating")
			Expect(p.Signal(syscall.SIGTERM)).To(Succeed())
			eventually(ctx, func() error {
				if answers(ctx, p.Socket()) == nil {
					return fmt.Errorf("the driver still takes calls after SIGTERM")
				}
				return nil
			})
			f.deletedLater(create().GetVolume().GetVolumeId())
			Expect(p.Wait()).To(Succeed(), "exit code 0")
			Expect(p.Socket()).NotTo(BeAnExistingFile())
		})
})
