package doctor

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// treeOf returns the tree of a cluster as people read it.
func treeOf(t *testing.T, colour bool, edits ...edit) (d Diagnosis, text string) {
	t.Helper()
	d = Diagnose(*healthy(t, append([]edit{ask(Question{Kind: AskCluster})}, edits...)...))
	var b bytes.Buffer
	csitest.Must(t, d.Write(&b, Options{Question: Question{Kind: AskCluster}, Colour: colour}))
	return d, b.String()
}

func TestAClusterIsATreeFromTheRackToThePod(t *testing.T) {
	disk10 := diskName + " (" + racktest.Disk + "), 10 GiB, "
	for name, c := range map[string]struct {
		edit   edit
		status int
		want   []string
	}{
		"all is well": {all(), 0, []string{
			"ok       the rack answers, project " + racktest.ProjectID,
			"ok         instance worker-1 (" + racktest.Instance + "): running, node worker-1",
			"ok           nvme1n1: " + disk10 + "attached → claim default/data → pod db-0"}},
		"a disk is faulted": {faulted, 2, []string{"at no instance",
			"broken       " + disk10 + "faulted → claim default/data → pod db-0",
			"↳ disk: DiskFaulted", "BROKEN LINK: disk"}},
		"nobody uses a volume": {unused, 0, []string{"at no instance",
			"ok           " + disk10 + "detached → claim default/data\n"}},
		"a claim has no volume": {unbound, 2, []string{"without a disk", "→ claim default/data"}},
		"a disk has no PersistentVolume": {without(kindVolume, kindClaim, kindPod, kindAttachment), 0,
			[]string{"ok           nvme1n1: " + disk10 + "attached → no PersistentVolume (see"}},
		"no node was asked": {noReport, 3, []string{
			"unseen       " + disk10 + "attached → claim default/data → pod db-0",
			"↳ not seen: device, filesystem, mounts"}},
	} {
		t.Run(name, func(t *testing.T) {
			d, text := treeOf(t, false, c.edit)
			for _, want := range c.want {
				if !strings.Contains(text, want) {
					t.Errorf("it lacks %q", want)
				}
			}
			if d.Status() != c.status || t.Failed() || strings.Contains(text, "\x1b") {
				t.Errorf("status %d, want %d, in\n%s", d.Status(), c.status, text)
			}
		})
	}
}

func TestATreeHasColoursWhereTheyAreWantedAndEscapesWhatOthersWrote(t *testing.T) {
	hostile := disk(func(d *Disk) { d.Name = "<script>\x1b[2J\u202e" })
	d, text := treeOf(t, true, hostile, faulted)
	if !strings.Contains(text, "\x1b[1;31mbroken  \x1b[0m") || strings.Contains(text, "\x1b[2J") ||
		strings.Contains(text, "\u202e") {
		t.Errorf("the text is %q", text)
	}
	var b bytes.Buffer
	csitest.Must(t, d.WriteHTML(&b))
	html := b.String()
	for _, want := range []string{"default-src 'none'", "&lt;script&gt;", `class="state broken"`,
		"<dt>reason</dt><dd>DiskFaulted</dd>"} {
		if !strings.Contains(html, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(html, "<script") || strings.ContainsAny(html, "\x1b\u202e") {
		t.Errorf("the page is %q", html)
	}
}

// A cluster is asked for in one pass: each list once, and each node once.
func TestAClusterOfAThousandVolumesIsAskedForByLists(t *testing.T) {
	const volumes, nodes = 1000, 64
	lists := map[string][]string{"driver": {workloadsJSON}}
	var disks, machines []string
	reports := map[string]inspection.Report{}
	for n := range nodes {
		name, id := fmt.Sprint("worker-", n), racktest.Numbered(5000+n)
		renamed := strings.NewReplacer("worker-1", name, racktest.Instance, id, "node-x", "node-"+name)
		for kind, text := range map[string]string{"nodes": nodeJSON, "csinodes": csiNodeJSON,
			"driver": driverPodJSON} {
			lists[kind] = append(lists[kind], renamed.Replace(text))
		}
		machines = append(machines, renamed.Replace(racktest.InstanceOf("running")))
		r := theNode()
		r.Instance, r.Volumes = id, nil
		reports["oxide-csi-node-"+name] = r
	}
	for v := range volumes {
		node := fmt.Sprint("worker-", v%nodes)
		name := volume.DiskName("blue", fmt.Sprint("pvc-", v))
		renamed := strings.NewReplacer(`"data"`, fmt.Sprintf(`"data-%d"`, v), pvName,
			fmt.Sprint("pv-", v), racktest.Disk, racktest.Numbered(v), diskName, name, `"csi-1"`,
			fmt.Sprintf(`"csi-%d"`, v),
			"worker-1", node, `"db-0"`, fmt.Sprintf(`"db-%d"`, v), racktest.Instance,
			racktest.Numbered(5000+v%nodes))
		for kind, text := range map[string]string{"persistentvolumes": pvJSON, "pods": podJSON,
			"persistentvolumeclaims": claimJSON, "volumeattachments": attachmentJSON} {
			lists[kind] = append(lists[kind], renamed.Replace(text))
		}
		disks = append(disks, renamed.Replace(racktest.DiskOf(racktest.AttachedHere)))
		r := reports["oxide-csi-node-"+node]
		one := theNode().Volumes[0]
		one.ID, one.Serial = racktest.Numbered(v), name
		one.Record = nil
		r.Volumes = append(r.Volumes, one)
		reports["oxide-csi-node-"+node] = r
	}
	var mu sync.Mutex
	asked := map[string]int{}
	count := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		asked[what]++
	}
	kubectl := func(_ context.Context, args ...string) ([]byte, error) {
		if args[0] == "exec" {
			count(args[2])
			return []byte(asJSON(t, reports[args[2]])), nil
		}
		kind := args[1]
		if strings.HasPrefix(kind, "pods,") {
			kind = "driver"
		}
		count(kind)
		return []byte(listJSON(lists[kind]...)), nil
	}
	client := servedBy(t, func(path string) string {
		count(path)
		return map[string]string{"/v1/disks": racktest.PageOf("", disks...),
			"/v1/instances": racktest.PageOf("", machines...),
			"/v1/me":        racktest.UserOf(racktest.Silo)}[path]
	})
	o := Options{Question: Question{Kind: AskCluster}, Kubectl: true}
	e := gather(t, Sources{Rack: client, Kubectl: kubectl}, o)
	for what, times := range asked {
		if times != 1 {
			t.Errorf("%s was asked %d times", what, times)
		}
	}
	d := Diagnose(e)
	leaves := 0
	for _, b := range d.tree() {
		leaves += len(b.Leaves)
	}
	if len(d.tree()) != nodes || leaves != volumes || len(d.Chains) != 1+nodes+volumes {
		t.Errorf("%d branches with %d leaves, of %d chains", len(d.tree()), leaves, len(d.Chains))
	}
	fmt.Printf("FIGURE doctor-tree volumes=%d nodes=%d kubectl_lists=9 node_reports=%d rack_lists=2\n",
		volumes, nodes, len(asked)-9-4)
}
