//go:build e2e

package e2e

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
	"github.com/oxidecomputer/oxide-csi-plugin/docs"
)

var _ = Describe("the documentation", func() {
	for _, path := range docs.OnCluster {
		It("D-1 D-58 contains commands that work as they are written: "+path, func(ctx SpecContext) {
			claim := s.Claim(ctx, Claim{Name: "claim"})
			user := s.Pod(ctx, Pod{Name: "pod", Claims: []string{claim}}).Running(ctx)
			reader := newReader(ctx, "NS="+s.ns, "POD="+user.name, "PVC="+claim,
				"NODE="+user.Node(ctx))
			reader.follow(ctx, path)
		}, NodeTimeout(5*time.Minute))
	}

	for _, path := range docs.OnColdRack {
		It("D-58 D-61 contains commands that attach a volume by hand and by the node keeper: "+path,
			Label("long"), func(ctx SpecContext) { followOnColdRack(ctx, path) },
			NodeTimeout(10*time.Minute))
	}

	It("D-57 contains commands that install, upgrade and remove the driver: "+
		strings.Join(docs.ByHelm, ", "), func(ctx SpecContext) {
		reader := newReader(ctx)
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
			By("following "+path, func() { reader.follow(ctx, path) })
			if path == docs.ByHelm[0] {
				for _, worker := range workers {
					Expect(registered(ctx, worker)).To(Succeed())
				}
				expectRelease(ctx)
				s.Beating(ctx, workers[0], s.Claim(ctx, Claim{Name: "by-helm"})).Delete(ctx)
				s.DeleteClaim(ctx, "by-helm")
				noVolumes(ctx)
			}
			if path == keeperPage {
				Expect(poll(ctx, rolloutTimeout, func(ctx context.Context) error {
					return deploymentReady(ctx, driverNamespace, keeperName)
				})).To(Succeed())
				expectRelease(ctx)
			}
		}
		unregistered(ctx)
	}, NodeTimeout(15*time.Minute))
})

// followOnColdRack follows a page that takes the rack's hot-plug away, stops and starts instances
// with their nodes, and runs the node keeper. The page puts everything back. If it fails, the
// cleanup does.
func followOnColdRack(ctx context.Context, path string) {
	GinkgoHelper()
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

// keeperPage is the page that turns the node keeper on.
const keeperPage = "docs/howto/node-keeper.md"

// expectRelease checks that the driver's pods run the images of the tested release, if a release is
// tested.
func expectRelease(ctx context.Context) {
	GinkgoHelper()
	if config.chart == "" {
		return
	}
	version := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(config.chart),
		"oxide-csi-driver-"), ".tgz")
	ours := "app in (" + controllerName + "," + nodeName + "," + keeperName + ")"
	pods := installedPods(ctx, ours, "")
	Expect(len(pods)).To(BeNumerically(">", len(workers)))
	for _, p := range pods {
		for _, c := range p.Spec.Containers {
			if strings.Contains(c.Image, "/oxide-") {
				Expect(c.Image).To(HaveSuffix(":v"+version), p.Name)
				By(p.Name + " runs " + c.Image)
			}
		}
	}
}

// guestPatches lists the patches of the overlay that make the nodes' driver use its guest's view on
// the simulated rack. They fit the chart of every release; not every chart has values for this.
var guestPatches = []string{"node-paths.yaml", "node-workers.yaml"}

// helmForGuests is a script that runs Helm and applies these patches to the chart's output. If a
// release is tested, it uses the release's chart instead of the tree's.
const helmForGuests = `#!/bin/sh
for word do
	shift
	[ "$word" != deploy/chart ] || word='%[2]s'
	set -- "$@" "$word"
done
case $1 in
install | upgrade) exec '%[1]s' "$@" --post-renderer patch-guests ;;
esac
exec '%[1]s' "$@"
`

const patchGuests = `#!/bin/sh
cat >'%[1]s/all.yaml' && exec kubectl kustomize '%[1]s'
`

// reader types the commands of a page at the root of the repository.
type reader struct {
	env []string
	dir string
}

// newReader returns a reader with what a doctor has, with kubectl set to the spec's namespace, with
// helm, and with the variables that the pages use.
func newReader(ctx context.Context, variables ...string) reader {
	GinkgoHelper()
	dir := GinkgoT().TempDir()
	bin := filepath.Join(dir, "bin")
	Expect(os.Mkdir(bin, 0o755)).To(Succeed())
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		Expect(os.WriteFile(path, []byte(text), mode)).To(Succeed())
		return path
	}
	helm, err := exec.CommandContext(ctx, "go", "tool", "-modfile=../tools/go.mod", "-n",
		"helm").Output()
	Expect(err).NotTo(HaveOccurred(), "build helm")
	write("bin/helm", fmt.Sprintf(helmForGuests, strings.TrimSpace(string(helm)),
		cmp.Or(config.chart, "deploy/chart")), 0o755)
	guests := filepath.Join(dir, "guests")
	Expect(os.Mkdir(guests, 0o755)).To(Succeed())
	write("bin/patch-guests", fmt.Sprintf(patchGuests, guests), 0o755)
	kustomization := "resources: [all.yaml]\npatches:\n"
	for _, name := range guestPatches {
		text, err := deploy.Files.ReadFile(overlay + "/" + name)
		Expect(err).NotTo(HaveOccurred())
		write("guests/"+name, string(text), 0o600)
		kustomization += "  - path: " + name + "\n"
	}
	write("guests/kustomization.yaml", kustomization, 0o600)
	token := write("token.txt", rackToken, 0o600)

	kubeconfig, err := clientcmd.LoadFromFile(filepath.Join(config.work, "kubeconfig"))
	Expect(err).NotTo(HaveOccurred())
	kubeconfig.Contexts[kubeconfig.CurrentContext].Namespace = s.ns
	Expect(clientcmd.WriteToFile(*kubeconfig, filepath.Join(dir, "kubeconfig"))).To(Succeed())
	return reader{dir: dir, env: append(append(newDoctor(ctx).env, variables...),
		"PATH="+bin+":"+doctorDir+":"+os.Getenv("PATH"),
		"KUBECONFIG="+filepath.Join(dir, "kubeconfig"), "OXIDE_TOKEN_FILE="+token)}
}

// rackVariables returns the variables with which an operator's program finds the rack, without a
// token.
func rackVariables() []string {
	GinkgoHelper()
	address, _, err := machines[controlPlane].IP()
	Expect(err).NotTo(HaveOccurred())
	return []string{fmt.Sprintf("OXIDE_HOST=http://%s:%d", address, rackAPIPort),
		"OXIDE_PROJECT=" + rackProject, "OXIDE_CLUSTER_ID=e2e"}
}

// follow runs those commands of a page that are for a cluster.
func (r reader) follow(ctx context.Context, path string) {
	GinkgoHelper()
	page, err := docs.Read("..", path)
	Expect(err).NotTo(HaveOccurred())
	blocks, err := page.Blocks()
	Expect(err).NotTo(HaveOccurred())
	blocks = docs.RunBy(docs.Cluster, blocks)
	Expect(blocks).NotTo(BeEmpty())
	r.run(ctx, blocks...)
}

func (r reader) run(ctx context.Context, blocks ...docs.Block) {
	GinkgoHelper()
	Expect(docs.Session{Root: "..", Dir: r.dir, Env: r.env}.Run(ctx, blocks)).To(Succeed())
}
