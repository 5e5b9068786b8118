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
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// failFast is how long a misconfigured driver may take to say so and end. The race detector's
// build takes a multiple of the real one's time to start.
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
		// An empty directory, so that the machine that runs this is no instance.
		"OXIDE_SYSFS_ROOT": sysfsOf(dir),
		"OXIDE_STATE_DIR":  stateDirOf(dir),
	}
}

// sysfsOf is an empty directory beside dir, in which a driver looks for a sysfs in vain.
func sysfsOf(dir string) string {
	GinkgoHelper()
	sysfs := dir + "-sys"
	Expect(os.MkdirAll(sysfs, 0o755)).To(Succeed())
	DeferCleanup(os.RemoveAll, sysfs)
	return sysfs
}

// stateDirOf is where a driver may make its state directory.
func stateDirOf(dir string) string {
	GinkgoHelper()
	DeferCleanup(os.RemoveAll, dir+"-state")
	return dir + "-state"
}

// driverCommand is the driver with exactly that environment and the machine's PATH.
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

// expectMisconfigured runs the driver, which must end at once with exit code 1 and one line that
// has the words, and not the secret.
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

// workDir is a directory of the spec's own, short enough for a socket in it.
func workDir() string {
	GinkgoHelper()
	dir, err := os.MkdirTemp(theRun.Dir, "work-")
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(os.RemoveAll, dir)
	return dir
}

// misconfiguration is one variable that is missing (empty) or wrong.
type misconfiguration struct {
	base     func(dir string) map[string]string
	variable string
	value    string
	// without are other variables that are taken away, so that this one counts.
	without []string
}

var _ = Describe("a misconfigured driver", func() {
	DescribeTable("B-26 ends at once with exit code 1 and one line that names the variable",
		func(ctx SpecContext, m misconfiguration, words ...string) {
			dir := workDir()
			env := m.base(dir)
			for _, variable := range append(m.without, m.variable) {
				delete(env, variable)
			}
			if m.value != "" {
				env[m.variable] = strings.ReplaceAll(m.value, "DIR", dir)
			}
			expectMisconfigured(ctx, env, append(words, m.variable)...)
			Expect(filepath.Join(dir, "csi.sock")).NotTo(BeAnExistingFile())
		},
		wrong("B-28 no mode", misconfiguration{base: controllerEnv, variable: "OXIDE_MODE"}),
		wrong("B-28 a mode that is none", misconfiguration{controllerEnv, "OXIDE_MODE",
			"both-" + harness.Canary, nil}, "controller", "node", "all"),
		wrong("B-18 no endpoint", misconfiguration{base: controllerEnv, variable: "CSI_ENDPOINT"}),
		wrong("B-17 an endpoint that is no UNIX socket",
			misconfiguration{controllerEnv, "CSI_ENDPOINT", "tcp://127.0.0.1:10000", nil}),
		wrong("B-18 an endpoint with two slashes",
			misconfiguration{controllerEnv, "CSI_ENDPOINT", "unix://csi/csi.sock", nil}),
		wrong("B-18 a relative endpoint",
			misconfiguration{controllerEnv, "CSI_ENDPOINT", "csi.sock", nil}),
		wrong("B-18 an endpoint that does not end in .sock",
			misconfiguration{controllerEnv, "CSI_ENDPOINT", "unix://DIR/csi.socket", nil}),
		wrong("B-18 an endpoint in a directory that is not there",
			misconfiguration{controllerEnv, "CSI_ENDPOINT", "unix://DIR/none/csi.sock", nil}),
		wrong("B-26 no host", misconfiguration{base: controllerEnv, variable: "OXIDE_HOST"}),
		wrong("B-26 a host that is no URL",
			misconfiguration{controllerEnv, "OXIDE_HOST", "http://%zz" + harness.Canary, nil}),
		wrong("B-26 a host with another scheme",
			misconfiguration{controllerEnv, "OXIDE_HOST", "ftp://" + harness.Canary, nil}),
		wrong("B-26 no token", misconfiguration{base: controllerEnv, variable: "OXIDE_TOKEN"}),
		wrong("B-26 a token with a line break in it",
			misconfiguration{controllerEnv, "OXIDE_TOKEN", harness.Canary + "\nx", nil}),
		wrong("B-26 a token file that is not there", misconfiguration{controllerEnv,
			"OXIDE_TOKEN_FILE", "DIR/none", []string{"OXIDE_TOKEN"}}),
		wrong("B-26 a token file that is empty", misconfiguration{controllerEnv,
			"OXIDE_TOKEN_FILE", "/dev/null", []string{"OXIDE_TOKEN"}}),
		wrong("B-26 no project", misconfiguration{base: controllerEnv, variable: "OXIDE_PROJECT"}),
		wrong("B-26 a project that no rack can have",
			misconfiguration{controllerEnv, "OXIDE_PROJECT", "No Project " + harness.Canary, nil}),
		wrong("B-26 a CA file that is not there",
			misconfiguration{controllerEnv, "OXIDE_CA_FILE", "DIR/none", nil}),
		wrong("B-26 a CA file without a certificate",
			misconfiguration{controllerEnv, "OXIDE_CA_FILE", "/dev/null", nil}),
		wrong("D-64 no instance ID on a machine that is no instance",
			misconfiguration{base: nodeEnv, variable: "OXIDE_INSTANCE_ID"}),
		wrong("NI-4 an instance ID that is no UUID",
			misconfiguration{nodeEnv, "OXIDE_INSTANCE_ID", "host-" + harness.Canary, nil}),
		wrong("D-67 a metadata file that is not there", misconfiguration{nodeEnv,
			"OXIDE_INSTANCE_METADATA_FILE", "DIR/none", []string{"OXIDE_INSTANCE_ID"}}),
		wrong("D-67 a metadata file without the ID", misconfiguration{nodeEnv,
			"OXIDE_INSTANCE_METADATA_FILE", "/dev/null", []string{"OXIDE_INSTANCE_ID"}}),
		wrong("B-26 a state directory that is not absolute",
			misconfiguration{nodeEnv, "OXIDE_STATE_DIR", "state-" + harness.Canary, nil}),
		wrong("B-26 a state directory that cannot be made",
			misconfiguration{nodeEnv, "OXIDE_STATE_DIR", "/dev/null/" + harness.Canary, nil}),
		wrong("B-26 a number of disks that is none",
			misconfiguration{nodeEnv, "OXIDE_MAX_DISKS", harness.Canary, nil}),
		wrong("B-26 a negative number of disks",
			misconfiguration{nodeEnv, "OXIDE_MAX_DISKS", "-1", nil}),
		wrong("B-26 a time to wait for devices that is none",
			misconfiguration{nodeEnv, "OXIDE_DEVICE_TIMEOUT", harness.Canary, nil}),
		wrong("B-26 a negative time to wait for devices",
			misconfiguration{nodeEnv, "OXIDE_DEVICE_TIMEOUT", "-1s", nil}),
		wrong("B-26 a limit for late changes that is no duration",
			misconfiguration{nodeEnv, "OXIDE_LATE_LIMIT", harness.Canary, nil}),
		wrong("B-26 no sysfs where it is said to be",
			misconfiguration{nodeEnv, "OXIDE_SYSFS_ROOT", "DIR/none", nil}),
		wrong("B-26 no devices where they are said to be",
			misconfiguration{nodeEnv, "OXIDE_DEV_ROOT", "DIR/none", nil}),
		wrong("B-26 a log level that is none",
			misconfiguration{nodeEnv, "OXIDE_LOG_LEVEL", harness.Canary, nil}, "debug"),
		wrong("B-26 a log format that is none",
			misconfiguration{nodeEnv, "OXIDE_LOG_FORMAT", harness.Canary, nil}, "json", "text"),
		wrong("B-26 a cluster ID that is too long", misconfiguration{controllerEnv,
			"OXIDE_CLUSTER_ID", strings.Repeat(harness.Canary, 10), nil}),
		wrong("B-26 an address for metrics that is none",
			misconfiguration{nodeEnv, "OXIDE_METRICS_ADDRESS", harness.Canary, nil}),
		wrong("B-26 a liveness endpoint that is none",
			misconfiguration{nodeEnv, "OXIDE_LIVENESS_ENDPOINT", harness.Canary, nil}),
		wrong("B-26 a leave socket that is not absolute",
			misconfiguration{nodeEnv, "OXIDE_LEAVE_SOCKET", "leave-" + harness.Canary, nil}),
		wrong("B-26 an address for profiles that other machines reach",
			misconfiguration{nodeEnv, "OXIDE_PPROF_ADDRESS", "0.0.0.0:0", nil}, "localhost"),
		wrong("D-73 a rack whose name is no topology value",
			misconfiguration{nodeEnv, "OXIDE_TOPOLOGY_RACK", "-" + harness.Canary + "-", nil}),
		wrong("B-27 a region whose name is too long", misconfiguration{nodeEnv,
			"OXIDE_TOPOLOGY_REGION", strings.Repeat("r", 64), nil}),
		wrong("B-27 a zone with a slash in its name",
			misconfiguration{nodeEnv, "OXIDE_TOPOLOGY_ZONE", harness.Canary + "/1", nil}),
		wrong("B-27 a topology that is no list of pairs",
			misconfiguration{nodeEnv, "OXIDE_TOPOLOGY", harness.Canary, nil}),
		wrong("B-26 a switch that is neither on nor off",
			misconfiguration{nodeEnv, "OXIDE_TOPOLOGY_INSTANCE", harness.Canary, nil}, "true", "false"),
	)

	It("B-26 every variable is among these", func(ctx SpecContext) {
		help, err := driverCommand(ctx, nil, "--help").CombinedOutput()
		Expect(err).NotTo(HaveOccurred())
		known := regexp.MustCompile(`\$((?:OXIDE|CSI)_[A-Z_]+)`).FindAllStringSubmatch(string(help), -1)
		Expect(len(known)).To(BeNumerically(">", 10), "%s", help)
		for _, match := range known {
			Expect(wrongVariables).To(HaveKey(match[1]))
		}
	})
})

// wrongVariables are those that the table above gets wrong.
var wrongVariables = map[string]bool{}

// wrong is an entry of the table of misconfigurations.
func wrong(text string, m misconfiguration, words ...any) TableEntry {
	wrongVariables[m.variable] = true
	return Entry(text, append([]any{Offset(1), m}, words...)...)
}

// started runs the driver with an environment of the spec's own and waits until it serves.
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

// answers reports whether a driver answers at the socket.
func answers(ctx context.Context, socket string) error {
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err = csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	return err
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
	It("B-19 has nothing beside its socket, and nothing at all when it has ended",
		func(ctx SpecContext) {
			dir := workDir()
			cmd := started(ctx, dir, nodeEnv(dir))
			Expect(inDir(dir)).To(ConsistOf("csi.sock"))
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

	It("B-19 lets one serve of many that start at once", func(ctx SpecContext) {
		dir := workDir()
		killed := started(ctx, dir, nodeEnv(dir))
		Expect(killed.Process.Kill()).To(Succeed())
		Expect(killed.Wait()).NotTo(Succeed())
		const many = 8
		ended := make(chan error, many)
		for range many {
			cmd := driverCommand(context.WithoutCancel(ctx), nodeEnv(dir))
			Expect(cmd.Start()).To(Succeed())
			DeferCleanup(func() { _ = cmd.Process.Kill() })
			go func() { ended <- cmd.Wait() }()
		}
		for range many - 1 {
			Eventually(ctx, ended).WithTimeout(20 * time.Second).Should(Receive(HaveOccurred()))
		}
		Expect(answers(ctx, filepath.Join(dir, "csi.sock"))).To(Succeed())
		Expect(inDir(dir)).To(ConsistOf("csi.sock"))
		Expect(ended).NotTo(Receive(), "the one that answers serves on")
	})

	It("B-19 leaves a socket alone at which somebody answers", func(ctx SpecContext) {
		dir := workDir()
		started(ctx, dir, nodeEnv(dir))
		expectMisconfigured(ctx, nodeEnv(dir), "CSI_ENDPOINT")
		Expect(answers(ctx, filepath.Join(dir, "csi.sock"))).To(Succeed())
	})

	It("B-19 leaves a socket alone at which somebody listens but says nothing",
		func(ctx SpecContext) {
			dir := workDir()
			listener, err := net.Listen("unix", filepath.Join(dir, "csi.sock"))
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(listener.Close)
			expectMisconfigured(ctx, nodeEnv(dir), "CSI_ENDPOINT")
			Expect(inDir(dir)).To(ConsistOf("csi.sock"))
		})

	It("B-19 leaves a file alone that is no socket", func(ctx SpecContext) {
		dir := workDir()
		path := filepath.Join(dir, "csi.sock")
		Expect(os.WriteFile(path, []byte("precious"), 0o600)).To(Succeed())
		expectMisconfigured(ctx, nodeEnv(dir), "CSI_ENDPOINT")
		Expect(os.ReadFile(path)).To(BeEquivalentTo("precious"))
	})

	It("B-22 lets only its owner and group use the socket", func(ctx SpecContext) {
		dir := workDir()
		started(ctx, dir, nodeEnv(dir))
		info, err := os.Stat(filepath.Join(dir, "csi.sock"))
		Expect(err).NotTo(HaveOccurred())
		Expect(info.Mode().Perm() & 0o007).To(BeZero())
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

	It("B-23 takes every flag from a variable too", func(ctx SpecContext) {
		cmd := driverCommand(ctx, nil, "--help")
		help, _ := cmd.CombinedOutput()
		for flag, variable := range map[string]string{
			"mode": "OXIDE_MODE", "endpoint": "CSI_ENDPOINT", "host": "OXIDE_HOST",
			"project": "OXIDE_PROJECT", "token-file": "OXIDE_TOKEN_FILE",
			"ca-file": "OXIDE_CA_FILE", "cluster-id": "OXIDE_CLUSTER_ID",
			"sysfs-root": "OXIDE_SYSFS_ROOT", "dev-root": "OXIDE_DEV_ROOT",
			"instance-id": "OXIDE_INSTANCE_ID", "max-disks": "OXIDE_MAX_DISKS",
			"instance-metadata-file": "OXIDE_INSTANCE_METADATA_FILE",
			"log-level":              "OXIDE_LOG_LEVEL", "log-format": "OXIDE_LOG_FORMAT",
			"topology": "OXIDE_TOPOLOGY", "topology-instance": "OXIDE_TOPOLOGY_INSTANCE",
			"late-limit": "OXIDE_LATE_LIMIT", "device-timeout": "OXIDE_DEVICE_TIMEOUT",
			"metrics-address": "OXIDE_METRICS_ADDRESS",
		} {
			Expect(string(help)).To(ContainSubstring("-"+flag), "--help knows --%s", flag)
			Expect(string(help)).To(ContainSubstring(variable), "--help says %s", variable)
		}
		Expect(string(help)).NotTo(MatchRegexp(`-token\b[^-]`), "a token is never a flag")
	})

	It("B-23 a flag wins over its variable", func(ctx SpecContext) {
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
	It("B-29 finishes what is under way at SIGTERM, takes nothing new, and ends well",
		func(ctx SpecContext) {
			p := f.controller(ctx, harness.PluginOptions{})
			f.switched(ctx, "create_hold", "2s", "0s")
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
