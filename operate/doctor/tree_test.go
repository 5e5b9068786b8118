package doctor

import (
	"bytes"
	"context"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

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

func TestATreeColoursAndEscapesText(t *testing.T) {
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

// TestAClusterIsAskedForByLists checks that each list is requested once, and that the node is asked
// once for its several volumes.
func TestAClusterIsAskedForByLists(t *testing.T) {
	objects, err := os.ReadFile("testdata/cluster.json")
	csitest.Must(t, err)
	var mu sync.Mutex
	asked := map[string]int{}
	count := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		asked[what]++
	}
	kubectl := func(_ context.Context, args ...string) ([]byte, error) {
		count(strings.Join(args[:3], " "))
		switch {
		case args[0] == "exec":
			return []byte(asJSON(t, theNode())), nil
		case args[1] == "persistentvolumes", strings.HasPrefix(args[1], "pods,"):
			return objects, nil
		}
		return []byte(listJSON()), nil
	}
	client := servedBy(t, func(path string) string {
		count(path)
		return map[string]string{"/v1/disks": racktest.PageOf("",
			racktest.DiskOf(racktest.AttachedHere)),
			"/v1/instances": racktest.PageOf("", racktest.InstanceOf("running")),
			"/v1/me":        racktest.UserOf(racktest.Silo)}[path]
	})
	d := Diagnose(gather(t, Sources{Rack: client, Kubectl: kubectl},
		Options{Question: Question{Kind: AskCluster}, Kubectl: true}))
	for what, times := range asked {
		if times != 1 {
			t.Errorf("%s was asked %d times", what, times)
		}
	}
	// Nine lists and a node of Kubernetes; the rack's project, silo, disks and instances.
	if len(asked) != 14 || len(d.Chains) < 5 {
		t.Errorf("%d chains; asked %v", len(d.Chains), asked)
	}
}
