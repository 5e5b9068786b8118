//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
	"github.com/oxidecomputer/oxide-csi-plugin/docs"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

var _ = Describe("the documentation", func() {
	for _, path := range docs.OnCluster {
		It("has commands that work as they are written: "+path+" (D-1, D-58)", func(ctx SpecContext) {
			claim := s.Claim(ctx, Claim{Name: "claim"})
			user := s.Pod(ctx, Pod{Name: "pod", Claims: []string{claim}}).Running(ctx)
			reader := newReader(ctx, "NS="+s.ns, "POD="+user.name, "PVC="+claim,
				"NODE="+user.Node(ctx))
			reader.follow(ctx, path)
		}, NodeTimeout(5*time.Minute))
	}

	for _, path := range docs.OnColdRack {
		It("has commands that attach a volume on a rack without hot-plug: "+path+" (D-58, D-61)",
			Label("long"), func(ctx SpecContext) { followOnColdRack(ctx, path) },
			NodeTimeout(10*time.Minute))
	}

	It("has commands that make a release, and install, upgrade and remove it: "+
		strings.Join(docs.ByHelm, ", ")+" (D-57)", func(ctx SpecContext) {
		reader := newReader(ctx, "CHART="+releasedChart, "REGISTRY="+serveRegistry(ctx),
			"BASE="+config.Base)
		reader.root = checkOut(ctx)
		DeferCleanup(func(ctx SpecContext) {
			reader.run(ctx, docs.Block{Text: "helm uninstall oxide-csi --namespace oxide-csi " +
				"--ignore-not-found --wait --timeout 3m"})
			removeLeases(ctx, driverNamespace, "csi-oxide")
			removeLeases(ctx, driverNamespace, keeperLease)
			patchNode(ctx, workers[0], fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, mayStop))
			install(ctx)
		}, NodeTimeout(3*rolloutTimeout))
		uninstall(ctx)
		unregistered(ctx)
		for _, path := range docs.ByHelm {
			began, steps := time.Now(), 0
			By("following "+path, func() { steps = reader.follow(ctx, path) })
			if path == installPage {
				fmt.Printf("FIGURE operator-path steps=%d minutes=%.1f manual_decisions=%d\n", steps,
					time.Since(began).Minutes(), decisions())
				registered(ctx)
				expectRelease(ctx)
				expectNames(ctx, filepath.Join(reader.root, "dist"))
				noVolumes(ctx)
			}
			if path == keeperPage {
				ready(ctx, "Deployment", driverNamespace, keeperName)
				expectRelease(ctx)
			}
		}
		unregistered(ctx)
	}, NodeTimeout(20*time.Minute))
})

// followOnColdRack follows a page that switches hot-plug off, stops and starts instances, and runs
// the node keeper. The page's last commands undo this. The cleanup does the same in case an earlier
// command fails.
func followOnColdRack(ctx context.Context, path string) {
	reader := newReader(ctx)
	DeferCleanup(func(ctx SpecContext) {
		Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full", "instance_delay": "0s"})).
			To(Succeed())
		reader.run(ctx, docs.Block{Text: "kubectl delete --ignore-not-found " +
			"-f deploy/kustomize/node-keeper/rbac-node-keeper.yaml " +
			"-f deploy/kustomize/node-keeper/node-keeper.yaml"})
		removeLeases(ctx, driverNamespace, keeperLease)
		for _, worker := range workers {
			startInstance(ctx, worker)
			powerOn(ctx, worker)
			servesSinceBoot(ctx, worker)
			patchNode(ctx, worker, fmt.Sprintf(`{"metadata":{"labels":{%q:null},"annotations":{%q:null}},`+
				`"spec":{"unschedulable":null}}`, mayStop, cordonMark))
		}
		removeRecords(ctx)
	}, NodeTimeout(2*nodeLostTimeout))
	reader.follow(ctx, path)
}

const (
	installPage = "docs/howto/install.md"
	keeperPage  = "docs/howto/node-keeper.md"
)

// The commands on the installation page make a release with this version and this chart.
const (
	releasedVersion = "0.1.0-rc.1"
	releasedChart   = "dist/oxide-csi-driver-" + releasedVersion + ".tgz"
)

// checkOut clones the repository. A release needs a commit, so uncommitted changes become one.
func checkOut(ctx context.Context) string {
	dir := GinkgoT().TempDir()
	out, err := exec.CommandContext(ctx, "sh", "-ec", `git clone --quiet --shared --no-checkout .. "$1"
commit=$(git stash create)
git -C "$1" checkout --quiet --detach "${commit:-$(git rev-parse HEAD)}"`, "sh", dir).
		CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), string(out))
	return dir
}

// serveRegistry starts a registry without TLS on this machine, and allows the nodes to use it.
func serveRegistry(ctx context.Context) string {
	gateway := must(machines[controlPlane].run(ctx, "ip -4 route show default | cut -d ' ' -f 3"))
	listener := must(new(net.ListenConfig).Listen(ctx, "tcp", strings.TrimSpace(gateway)+":0"))
	address := listener.Addr().String()
	Expect(listener.Close()).To(Succeed())
	crane := exec.CommandContext(context.WithoutCancel(ctx), tool(ctx, "crane"), "registry", "serve",
		"--address", address, "--disk", GinkgoT().TempDir())
	crane.Stdout, crane.Stderr = GinkgoWriter, GinkgoWriter
	Expect(crane.Start()).To(Succeed())
	DeferCleanup(func() {
		Expect(crane.Process.Kill()).To(Succeed())
		_ = crane.Wait() // its error only says that it was killed
	})
	for _, n := range machines {
		must(n.run(ctx, fmt.Sprintf("mkdir -p /etc/containerd/certs.d/%[1]s && "+
			`echo '[host."http://%[1]s"]' >/etc/containerd/certs.d/%[1]s/hosts.toml`, address)))
	}
	return address
}

// decisions returns the number of decisions that the installation page asks for: the rows of its
// table.
func decisions() int {
	page := must(os.ReadFile(filepath.Join("..", installPage)))
	_, table, _ := strings.Cut(string(page), "## Decide before the first volume\n")
	table, _, _ = strings.Cut(table, "\n## ")
	const head = 2
	return strings.Count(table, "\n|") - head
}

func expectRelease(ctx context.Context) {
	ours := "app in (" + controllerName + "," + nodeName + "," + keeperName + ")"
	pods := installedPods(ctx, ours, "")
	Expect(len(pods)).To(BeNumerically(">", len(workers)))
	for _, p := range pods {
		for _, c := range p.Spec.Containers {
			if strings.Contains(c.Image, "/oxide-") {
				Expect(c.Image).To(HaveSuffix(":v"+releasedVersion), p.Name)
				By(p.Name + " runs " + c.Image)
			}
		}
	}
}

// expectNames imports an image of the release into a node, and checks that the image has the name
// in the manifests.
func expectNames(ctx context.Context, dist string) {
	const image = "oxide-node-keeper"
	n := machines[workers[0]]
	Expect(n.load(filepath.Join(dist, image+".oci.tar"))).To(Succeed())
	Expect(n.run(ctx, "ctr --namespace k8s.io images list --quiet")).To(
		ContainSubstring("docker.io/oxidecomputer/" + image + ":v" + releasedVersion + "\n"))
}

// guestPatches lists the patches that make the driver's pods use the guest view. They are needed
// because charts of older releases have no values for the guest view.
var guestPatches = []string{"node-paths.yaml", "node-workers.yaml"}

// helmForGuests is a script in place of helm. It applies guestPatches to the rendered chart.
const helmForGuests = `#!/bin/sh
case $1 in
install | upgrade) exec '%[1]s' "$@" --post-renderer patch-guests ;;
esac
exec '%[1]s' "$@"
`

const patchGuests = `#!/bin/sh
cat >'%[1]s/all.yaml' && exec kubectl kustomize '%[1]s'
`

// reader runs a page's commands in the root of a repository.
type reader struct {
	env       []string
	root, dir string
}

// newReader returns a reader for the commands of a page. The commands run helmForGuests as helm, in
// the spec's namespace, with newDoctor's environment and the given variables.
func newReader(ctx context.Context, variables ...string) reader {
	dir := GinkgoT().TempDir()
	bin := filepath.Join(dir, "bin")
	Expect(os.Mkdir(bin, 0o755)).To(Succeed())
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		Expect(os.WriteFile(path, []byte(text), mode)).To(Succeed())
		return path
	}
	write("bin/helm", fmt.Sprintf(helmForGuests, tool(ctx, "helm")), 0o755)
	guests := filepath.Join(dir, "guests")
	Expect(os.Mkdir(guests, 0o755)).To(Succeed())
	write("bin/patch-guests", fmt.Sprintf(patchGuests, guests), 0o755)
	kustomization := "resources: [all.yaml]\npatches:\n"
	for _, name := range guestPatches {
		text := must(deploy.Files.ReadFile(overlay + "/" + name))
		write("guests/"+name, string(text), 0o600)
		kustomization += "  - path: " + name + "\n"
	}
	write("guests/kustomization.yaml", kustomization, 0o600)
	token := write("token.txt", rackToken, 0o600)

	kubeconfig := must(clientcmd.LoadFromFile(filepath.Join(config.Work, "kubeconfig")))
	kubeconfig.Contexts[kubeconfig.CurrentContext].Namespace = s.ns
	Expect(clientcmd.WriteToFile(*kubeconfig, filepath.Join(dir, "kubeconfig"))).To(Succeed())
	return reader{root: "..", dir: dir, env: append(append(newDoctor(ctx).env, variables...),
		"PATH="+bin+":"+doctorDir+":"+os.Getenv("PATH"),
		"KUBECONFIG="+filepath.Join(dir, "kubeconfig"), "OXIDE_TOKEN_FILE="+token)}
}

func tool(ctx context.Context, name string) string {
	path, err := exec.CommandContext(ctx, "go", "tool", "-modfile=../tools/go.mod", "-n",
		name).Output()
	Expect(err).NotTo(HaveOccurred(), "build %s", name)
	return strings.TrimSpace(string(path))
}

func (r reader) follow(ctx context.Context, path string) int {
	blocks := must(must(docs.Read("..", path)).Blocks())
	blocks = docs.RunBy(docs.Cluster, blocks)
	Expect(blocks).NotTo(BeEmpty())
	r.run(ctx, blocks...)
	return len(blocks)
}

func (r reader) run(ctx context.Context, blocks ...docs.Block) {
	Expect(docs.Session{Root: r.root, Dir: r.dir, Env: r.env}.Run(ctx, blocks)).To(Succeed())
}

// doctor runs `oxide-csi-plugin doctor` on this machine, with the program of a node's image.
type doctor struct{ env []string }

// doctorDir is a directory with copies of a node's oxide-csi-plugin and of the control plane's
// kubectl. It is "" before the first call of newDoctor.
var doctorDir string

// newDoctor returns a doctor. Its first call copies programs from nodes, so a spec has to call it
// before it disturbs the nodes.
func newDoctor(ctx context.Context) doctor {
	if doctorDir == "" {
		dir := filepath.Join(config.Work, "doctor")
		Expect(os.MkdirAll(dir, 0o755)).To(Succeed())
		p := installedPod(ctx, ofNode, workers[0])
		copyFrom(ctx, controlPlane, `cat "$(command -v kubectl)"`, filepath.Join(dir, "kubectl"))
		copyFrom(ctx, workers[0], "cat /proc/"+processOf(ctx, p, "oxide-plugin")+"/exe",
			filepath.Join(dir, "oxide-csi-plugin"))
		doctorDir = dir
	}
	address, _, err := machines[controlPlane].IP()
	Expect(err).NotTo(HaveOccurred())
	return doctor{append(harness.Environ(),
		fmt.Sprintf("OXIDE_HOST=http://%s:%d", address, rackAPIPort), "OXIDE_PROJECT="+rackProject,
		"OXIDE_CLUSTER_ID=e2e", "OXIDE_TOKEN="+rackToken, "PATH="+doctorDir+":"+os.Getenv("PATH"),
		"KUBECONFIG="+filepath.Join(config.Work, "kubeconfig"))}
}

func copyFrom(ctx context.Context, node, script, path string) {
	file := must(os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755))
	Expect(machines[node].CommandContext(ctx, "sh", "-c", script).SetStdout(file).Run()).To(Succeed())
	Expect(file.Close()).To(Succeed())
}

func (d doctor) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(doctorDir, "oxide-csi-plugin"), args...)
	cmd.Env, cmd.Stderr = d.env, GinkgoWriter
	return cmd
}

func firstFinding(d harness.Diagnosis) (link, reason, wrong string) {
	for _, c := range d.Chains {
		if c.Finding.Link != "" {
			return c.Finding.Link, c.Finding.Reason, c.Finding.Wrong
		}
	}
	return "", "", ""
}

// ask runs doctor with a question, such as "pvc NAMESPACE/NAME".
func (d doctor) ask(ctx context.Context, question []string) (said harness.Diagnosis, err error) {
	// The exit status of doctor is not zero if it has findings.
	out, failed := d.command(ctx, append([]string{"doctor", "--output=json"}, question...)...).Output()
	if err := json.Unmarshal(out, &said); err != nil || len(said.Chains) == 0 {
		return said, fmt.Errorf("the doctor printed %q: %w, %w", out, failed, err)
	}
	fmt.Fprintf(GinkgoWriter, "%s\n", out)
	return said, nil
}

// finds repeats the question until doctor's first finding has this reason and is about this link of
// the diagnosis, such as "instance". It repeats because Kubernetes shows some states late.
func (d doctor) finds(ctx context.Context, link, reason string, question ...string) {
	Eventually(func(g Gomega) {
		said, err := d.ask(ctx, question)
		g.Expect(err).NotTo(HaveOccurred())
		foundLink, foundReason, wrong := firstFinding(said)
		g.Expect([]string{foundLink, foundReason}).To(Equal([]string{link, reason}), wrong)
	}).WithContext(ctx).Should(Succeed(), "the doctor asked about %v", question)
}

func (d doctor) findsNothing(ctx context.Context, question ...string) {
	link, reason, wrong := firstFinding(must(d.ask(ctx, question)))
	Expect(link).To(BeEmpty(), "the doctor asked about %v finds %s: %s", question, reason, wrong)
}

func (f *fixture) path(name string) string { return f.ns + "/" + name }

var _ = Describe("the examples", func() {
	It("mount the volumes of RFD 595, a device and a restored snapshot (D-15, D-58, D-71)",
		applyRFD)
	It("keep PostgreSQL's rows when its pod moves to the other node (D-59)", keepRows)
})

const postgresUser = "999" // the ID of the user postgres in PostgreSQL's image

// applyRFD applies the manifest of RFD 595 unchanged, and the project's further examples for it.
// The driver does what the manifest asks for. PostgreSQL itself fails, for two reasons that no
// driver can change: the image requires a password, and PostgreSQL creates no database in the root
// of a filesystem, because this directory contains lost+found.
func applyRFD(ctx SpecContext) {
	s.applyExample(ctx, "rfd-595-postgres.yaml", nil)
	s.applyExample(ctx, "block.yaml", nil)
	const claim = "oxide-postgres-data"
	server := &pod{s: s, name: "postgres"}
	pv := s.Bound(ctx, claim)
	size := pv.Spec.Capacity[corev1.ResourceStorage]
	Expect(size.String()).To(Equal("50Gi"))
	Expect(theRack.disk(ctx, pv.Spec.CSI.VolumeHandle).Size).To(BeEquivalentTo(50 << 30))
	Eventually(func() string {
		text, _ := api.CoreV1().Pods(s.ns).GetLogs(server.name, &corev1.PodLogOptions{}).DoRaw(ctx)
		return string(text) // empty until the container has started
	}).WithContext(ctx).Should(
		Or(ContainSubstring("lost+found"), ContainSubstring("superuser password is not specified")))
	Expect(theRack.attachedTo(ctx, pv.Spec.CSI.VolumeHandle)).To(Equal(server.Node(ctx)))
	Expect(server.get(ctx).Spec.Containers[0].VolumeMounts).To(
		ContainElement(HaveField("MountPath", "/var/lib/postgresql/data")))

	// The server has started, so its user now owns the root of the volume. Flush this change before
	// the snapshot is taken.
	beside := s.Pod(ctx, Pod{Claims: []string{claim}, Node: server.Node(ctx)})
	beside.Running(ctx).Sh(ctx, "sync -f /data/0")
	s.applyExample(ctx, "snapshot-restore.yaml", nil)
	restored := s.Pod(ctx, Pod{Claims: []string{"oxide-postgres-copy"}})
	for p, giB := range map[*pod]int{beside: 50, restored: 60} {
		Expect(p.Running(ctx).Sh(ctx, "stat -c '%u %a' /data/0; ls /data/0")).
			To(Equal(postgresUser + " 700\nlost+found"))
		kind, sizeBytes := p.Filesystem(ctx, "/data/0")
		Expect(kind).To(Equal("ext4"))
		Expect(sizeBytes).To(beMostOf(giB))
	}
	out := must(api.exec(ctx, s.ns, "block", "block", "blockdev", "--getsize64", "/dev/oxide"))
	Expect(out).To(Equal("10737418240\n"))
}

var _ = Describe("a growing claim", func() {
	It("keeps its data, even if another claim grows meanwhile and the quota first refuses its new "+
		"disk (D-58, D-68)", growsTwo, NodeTimeout(8*time.Minute))
})

// growsTwo grows the claims of an unused raw device and of a StatefulSet. At first the rack's quota
// has room for both snapshots and the StatefulSet's new disk, but not for the new raw device.
func growsTwo(ctx SpecContext) {
	const room, device = 4 << 30, "/dev/data-0"
	operator, before := newDoctor(ctx), must(theRack.Admin.State(ctx))
	run := func(args ...string) (string, error) {
		cmd := operator.command(ctx, append([]string{"claim"}, args...)...)
		cmd.Stderr = nil
		out, err := cmd.CombinedOutput()
		GinkgoWriter.Printf("claim %v:\n%s", args, out)
		return string(out), err
	}
	btrfs := s.Class(ctx, Class{Parameters: map[string]string{fsTypeKey: "btrfs"}})
	kept := s.Keepers(ctx, btrfs, "kept", 1)[0]
	sum, last := kept.Fill(ctx), kept.Beats(ctx)
	claims := []string{"data-" + kept.name, s.Claim(ctx, Claim{Block: true})}
	data, raw := s.path(claims[0]), s.path(claims[1])
	user := s.Pod(ctx, Pod{Claims: claims[1:]}).Running(ctx)
	noise := user.Sh(ctx, writeNoise(device))
	user.Delete(ctx)
	firsts := []string{s.Bound(ctx, claims[0]).Name, s.Bound(ctx, claims[1]).Name}
	enough := must(theRack.Admin.Switches(ctx)).QuotaBytes
	switchRack(ctx, "quota_bytes", must(theRack.Admin.State(ctx)).StorageBytes+room, enough)

	out, err := run("grow", raw, "--size=4Gi")
	Expect(err).To(HaveOccurred())
	Expect(out).To(And(ContainSubstring("1Gi (snapshot) and 4Gi (new disk)"),
		ContainSubstring("Storage Limit Exceeded"), ContainSubstring("--continue"),
		ContainSubstring("--undo")))
	must(run("grow", data, "--size=2Gi"))
	Expect(theRack.Admin.Switch(ctx, map[string]any{"quota_bytes": enough})).To(Succeed())
	must(run("grow", raw, "--continue"))

	Expect(kept.Present(ctx).Running(ctx).Beats(ctx)).To(BeNumerically(">", last), "no write is lost")
	Expect(kept.Sum(ctx)).To(Equal(sum))
	kind, sizeBytes := kept.Filesystem(ctx, "/data/0")
	Expect(kind).To(Equal("btrfs"))
	Expect(sizeBytes).To(beMostOf(2))
	user = s.Pod(ctx, Pod{Claims: claims[1:]}).Running(ctx)
	Expect(user.Sh(ctx, readNoise(device))).To(Equal(noise))
	Expect(user.Sh(ctx, "blockdev --getsize64 "+device)).To(Equal("4294967296"))

	for i, claim := range []string{data, raw} {
		must(run("forget", claim))
		volumeGone(ctx, firsts[i])
	}
	s.OneDiskEach(ctx, before, claims...)
	Eventually(func() (int, error) {
		state, err := theRack.Admin.State(ctx)
		return len(state.Snapshots), err
	}).WithContext(ctx).Should(Equal(len(before.Snapshots)), "the snapshots should be gone")
}

// keepRows kills the server after its last commit, so that only the data on the disk is left.
func keepRows(ctx SpecContext) {
	s.applyExample(ctx, "postgres.yaml", nil)
	server := &pod{s: s, name: "postgres-0"}
	query := func(sql string) (string, error) {
		return api.exec(ctx, s.ns, server.name, "postgres", "psql", "--username=postgres",
			"--no-align", "--tuples-only", "--command="+sql)
	}
	Eventually(func() error {
		_, err := query("select 1")
		return err
	}).WithContext(ctx).Should(Succeed(), "the server should answer")
	Expect(query("create table kept as select n from generate_series(1, 1000) n")).
		To(Equal("SELECT 1000\n"))
	first := server.Node(ctx)
	cordon(ctx, first, true)
	DeferCleanup(func(ctx SpecContext) { cordon(ctx, first, false) })
	now := int64(1)
	Expect(api.CoreV1().Pods(s.ns).Delete(ctx, server.name,
		metav1.DeleteOptions{GracePeriodSeconds: &now})).To(Succeed())
	server.Present(ctx)
	Eventually(func() (string, error) { return query("select count(*), sum(n) from kept") }).
		WithContext(ctx).Should(Equal("1000|500500\n"))
	Expect(server.Node(ctx)).NotTo(Equal(first))
}
