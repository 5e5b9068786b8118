//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

const (
	// started is the number of volumes for which the time to a running container is measured, one
	// after another.
	started = 20
	// inWaves is the total number of volumes that are created and deleted, and atOnce how many of
	// them exist at a time: as many as fit on the nodes.
	inWaves, atOnce = 100, 20
)

var _ = Describe("figures", Label("long"), func() {
	It("D-60 D-62 show that twenty pods do not wait for the driver, and that a hundred volumes which "+
		"are created and deleted in waves leave nothing", takeFigures, NodeTimeout(15*time.Minute))
})

// takeFigures measures twenty times how long a pod with a new volume waits. These twenty belong to
// the hundred.
func takeFigures(ctx SpecContext) {
	since, before, start := metav1.Now(), usages(ctx), time.Now()
	var waits []time.Duration
	var volumes []*corev1.PersistentVolume
	for range started {
		claim, wait := s.timeToRunning(ctx)
		waits = append(waits, wait)
		volumes = append(volumes, s.Bound(ctx, claim))
	}
	driver, rack := ourShare(ctx, since, volumes)
	fmt.Printf("FIGURE pod-start volumes=%d p50_ms=%d p95_ms=%d ours_p50_ms=%d "+
		"ours_p95_ms=%d of_it_rack_p50_ms=%d kubernetes_p50_ms=%d node_status_period_ms=%d\n",
		len(waits), percentile(waits, 50).Milliseconds(), percentile(waits, 95).Milliseconds(),
		percentile(driver, 50).Milliseconds(), percentile(driver, 95).Milliseconds(),
		percentile(rack, 50).Milliseconds(),
		percentile(without(waits, driver), 50).Milliseconds(), nodeStatusPeriod.Milliseconds())
	Expect(driver).To(HaveLen(started), "every volume has to be found in the driver's logs")

	// The nodes have no room for more pods before these are gone.
	s.ebb(ctx)
	waves, began := (inWaves-started)/atOnce, time.Now()
	for number := range waves {
		s.wave(ctx, number)
	}
	after := usages(ctx)
	tellUsage(before, after, time.Since(start))
	fmt.Printf("FIGURE waves volumes=%d at_once=%d seconds=%.0f of_it_waves=%d "+
		"seconds_a_wave=%.0f controller_peak_mib=%d node_peak_mib=%d\n", inWaves, atOnce,
		time.Since(start).Seconds(), waves, time.Since(began).Seconds()/float64(waves),
		after[controllerProgram].peakKiB>>10, after[nodeProgram].peakKiB>>10)
}

// timeToRunning creates a claim and a pod, and measures the time until the API reports that the pod
// runs.
func (f *fixture) timeToRunning(ctx context.Context) (claim string, wait time.Duration) {
	GinkgoHelper()
	name := fmt.Sprintf("timed-%d", pods.Add(1))
	watcher, err := api.CoreV1().Pods(f.ns).Watch(ctx,
		metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	Expect(err).NotTo(HaveOccurred())
	defer watcher.Stop()
	start := time.Now()
	claim = f.Claim(ctx, Claim{})
	f.Pod(ctx, Pod{Name: name, Claims: []string{claim}})
	limit := time.NewTimer(2 * time.Minute)
	defer limit.Stop()
	for {
		select {
		case event := <-watcher.ResultChan():
			p, ok := event.Object.(*corev1.Pod)
			Expect(ok).To(BeTrue(), "watching %s gave %v", name, event)
			if event.Type == watch.Modified && p.Status.Phase == corev1.PodRunning {
				return claim, time.Since(start)
			}
		case <-limit.C:
			Fail(fmt.Sprintf("pod %s did not run within two minutes", name))
		}
	}
}

// wave creates as many pods with a volume each as fit on the nodes, waits until all have written to
// their volumes, and deletes all.
func (f *fixture) wave(ctx context.Context, number int) {
	GinkgoHelper()
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
	GinkgoHelper()
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

// ourCalls lists the CSI calls between a claim and a running container.
var ourCalls = []string{
	"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
}

// ourShare returns, for each volume, how long the driver's calls took according to its log, and the
// part of that time which the rack took according to its log. It leaves out a volume if one of its
// calls is missing.
func ourShare(ctx context.Context, since metav1.Time, volumes []*corev1.PersistentVolume) (
	driver, rack []time.Duration) {
	GinkgoHelper()
	took := map[string]map[string]time.Duration{}
	for _, line := range driverLogs(ctx, since) {
		fields := logFields(line)
		object := fields["volume"]
		if fields["method"] == "CreateVolume" {
			object = fields["name"]
		}
		d, err := time.ParseDuration(fields["took"])
		if err != nil || fields["msg"] != "done" {
			continue
		}
		if took[object] == nil {
			took[object] = map[string]time.Duration{}
		}
		took[object][fields["method"]] += d
	}
	requests, err := theRack.Admin.Requests(ctx, 0)
	Expect(err).NotTo(HaveOccurred())
	served := map[string]time.Duration{}
	for _, r := range requests {
		served[r.ObjectID] += time.Duration(r.DurationMS * float64(time.Millisecond))
	}
	for _, pv := range volumes {
		var sum time.Duration
		complete := true
		for _, method := range ourCalls {
			object := pv.Spec.CSI.VolumeHandle
			if method == "CreateVolume" {
				object = pv.Name
			}
			d, ok := took[object][method]
			sum, complete = sum+d, complete && ok
		}
		if complete {
			driver = append(driver, sum)
			rack = append(rack, served[pv.Spec.CSI.VolumeHandle])
		}
	}
	return driver, rack
}

// driverLogs returns the log lines of all containers of the driver since a time.
func driverLogs(ctx context.Context, since metav1.Time) []string {
	GinkgoHelper()
	list, err := api.CoreV1().Pods(driverNamespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=oxide-csi-driver"})
	Expect(err).NotTo(HaveOccurred())
	var lines []string
	for _, p := range list.Items {
		text, err := api.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &corev1.PodLogOptions{
			Container: "oxide-plugin", SinceTime: &since}).DoRaw(ctx)
		Expect(err).NotTo(HaveOccurred())
		lines = append(lines, strings.Split(string(text), "\n")...)
	}
	return lines
}

// logFields returns the key=value pairs of a line of the driver's log whose values contain no
// spaces.
func logFields(line string) map[string]string {
	fields := map[string]string{}
	for field := range strings.FieldsSeq(line) {
		if key, value, ok := strings.Cut(field, "="); ok {
			fields[key] = value
		}
	}
	return fields
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
	GinkgoHelper()
	most := map[string]usage{}
	for _, worker := range workers {
		report, err := machines[worker].run(ctx, measured)
		Expect(err).NotTo(HaveOccurred())
		for line := range strings.Lines(report) {
			var u usage
			fields := strings.SplitN(strings.TrimSpace(line), " ", 3)
			Expect(fields).To(HaveLen(3))
			u.peakKiB, err = strconv.Atoi(fields[0])
			Expect(err).NotTo(HaveOccurred())
			u.cpuMillis, err = strconv.Atoi(fields[1])
			Expect(err).NotTo(HaveOccurred())
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
	GinkgoHelper()
	Expect(after).To(And(HaveKey(controllerProgram), HaveKey(nodeProgram)))
	for _, name := range slices.Sorted(maps.Keys(after)) {
		cpu := after[name].cpuMillis - before[name].cpuMillis
		fmt.Printf("FIGURE usage program=%s peak_mib=%d cpu_ms=%d mean_millicores=%d volumes=%d\n",
			strings.ReplaceAll(name, " --mode=", "-"), after[name].peakKiB>>10, cpu,
			int64(cpu)*1000/wall.Milliseconds(), inWaves)
	}
}

// percentile returns the smallest value that at least p percent of all values do not exceed.
func percentile(values []time.Duration, p float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(0, int(math.Ceil(p/100*float64(len(sorted))))-1)]
}

func without(all, part []time.Duration) []time.Duration {
	var rest []time.Duration
	for i := range min(len(all), len(part)) {
		rest = append(rest, all[i]-part[i])
	}
	return rest
}
