//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// inWaves is the total number of volumes that are created and deleted, and atOnce how many of them
// exist at a time: as many as fit on the nodes.
const inWaves, atOnce = 100, 20

var _ = Describe("figures", Label("long"), func() {
	It("show that a hundred volumes which are created and deleted in waves leave nothing (D-60, D-62)",
		takeFigures, NodeTimeout(15*time.Minute))
})

func takeFigures(ctx SpecContext) {
	before, began := usages(ctx), time.Now()
	const waves = inWaves / atOnce
	for number := range waves {
		s.wave(ctx, number)
	}
	after, took := usages(ctx), time.Since(began)
	tellUsage(before, after, took)
	fmt.Printf("FIGURE waves volumes=%d at_once=%d seconds=%.0f seconds_a_wave=%.0f "+
		"controller_peak_mib=%d node_peak_mib=%d\n", inWaves, atOnce, took.Seconds(),
		took.Seconds()/waves, after[controllerProgram].peakKiB>>10, after[nodeProgram].peakKiB>>10)
}

// wave creates as many pods with a volume each as fit on the nodes, waits until all have written to
// their volumes, and deletes all.
func (f *fixture) wave(ctx context.Context, number int) {
	By(fmt.Sprintf("wave %d", number+1))
	made := make([]*pod, atOnce)
	all := make([]string, atOnce)
	for i := range made {
		all[i] = f.Claim(ctx, Claim{Name: fmt.Sprintf("wave-%d-%d", number, i)})
		made[i] = f.Pod(ctx, Pod{Claims: all[i : i+1], Script: "echo written > /data/0/file"})
	}
	for _, p := range made {
		p.Running(ctx)
	}
	f.ebb(ctx)
}

// ebb deletes all pods and claims of the fixture, and waits until their volumes are gone.
func (f *fixture) ebb(ctx context.Context) {
	now := metav1.DeleteOptions{}
	Expect(api.CoreV1().Pods(f.ns).DeleteCollection(ctx, now, metav1.ListOptions{})).To(Succeed())
	Expect(api.CoreV1().PersistentVolumeClaims(f.ns).DeleteCollection(ctx, now,
		metav1.ListOptions{})).To(Succeed())
	Eventually(func(g Gomega) {
		left, err := api.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		var ours []string
		for _, pv := range left.Items {
			if pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.Namespace == f.ns {
				ours = append(ours, pv.Name)
			}
		}
		g.Expect(ours).To(BeEmpty())
	}).WithContext(ctx).WithTimeout(settleTimeout).Should(Succeed(),
		"the volumes should be gone")
}

// usage is the memory and processor time that a container's process has used since it started.
type usage struct{ peakKiB, cpuMillis int }

// measured is a script that lists the programs of the driver's pods. A stand-in has the name of the
// program that it replaces.
const measured = `for name in oxide-csi-plugin csi-provisioner csi-attacher csi-snapshotter \
	node-driver-registrar csi-node-driver-registrar livenessprobe; do
	for pid in $(pidof $name); do
		mode=$(tr '\0' '\n' </proc/$pid/cmdline | sed -n 's/^--mode=/ --mode=/p')
		peak=$(awk '/^VmHWM/{print $2}' /proc/$pid/status)
		ticks=$(awk '{print $14 + $15}' /proc/$pid/stat)
		echo "$peak $((ticks * 1000 / $(getconf CLK_TCK))) $name$mode"
	done
done`

// usages returns, for each program, the highest peak memory and the highest processor time of its
// processes.
func usages(ctx context.Context) map[string]usage {
	most := map[string]usage{}
	for _, worker := range workers {
		for line := range strings.Lines(must(machines[worker].run(ctx, measured))) {
			var u usage
			fields := strings.SplitN(strings.TrimSpace(line), " ", 3)
			Expect(fields).To(HaveLen(3))
			u.peakKiB = must(strconv.Atoi(fields[0]))
			u.cpuMillis = must(strconv.Atoi(fields[1]))
			old := most[fields[2]]
			most[fields[2]] = usage{max(old.peakKiB, u.peakKiB), max(old.cpuMillis, u.cpuMillis)}
		}
	}
	return most
}

const (
	controllerProgram = "oxide-csi-plugin --mode=controller"
	nodeProgram       = "oxide-csi-plugin --mode=node"
)

// tellUsage prints how much processor time each program used during the waves, and its peak memory.
// The requests in the manifests come from these figures.
func tellUsage(before, after map[string]usage, wall time.Duration) {
	Expect(after).To(And(HaveKey(controllerProgram), HaveKey(nodeProgram)))
	for _, name := range slices.Sorted(maps.Keys(after)) {
		cpu := after[name].cpuMillis - before[name].cpuMillis
		fmt.Printf("FIGURE usage program=%s peak_mib=%d cpu_ms=%d mean_millicores=%d volumes=%d\n",
			strings.ReplaceAll(name, " --mode=", "-"), after[name].peakKiB>>10, cpu,
			int64(cpu)*1000/wall.Milliseconds(), inWaves)
	}
}
