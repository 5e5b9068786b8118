package doctor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

// cluster answers as kubectl does.
type cluster struct {
	t         *testing.T
	forbidden string // a resource that may not be listed, or "exec"
	report    inspection.Report
	noDriver  bool // no pod of the driver is there
	ran       []string
}

func (k *cluster) kubectl(_ context.Context, args ...string) ([]byte, error) {
	k.ran = append(k.ran, strings.Join(args, " "))
	if k.forbidden != "" && (args[0] == k.forbidden || args[1] == k.forbidden) {
		return nil, errors.New(args[0] + ": forbidden")
	}
	if args[0] == "exec" {
		return []byte(asJSON(k.t, k.report)), nil
	}
	if args[0] != "get" {
		k.t.Errorf("kubectl %q is neither get nor exec", args)
	}
	for resource, items := range map[string][]string{"persistentvolumes": {pvJSON},
		"persistentvolumeclaims": {claimJSON}, "volumeattachments": {attachmentJSON},
		"csinodes": {csiNodeJSON}, "nodes": {nodeJSON}, "events": nil} {
		if args[1] == resource {
			return []byte(listJSON(items...)), nil
		}
	}
	if slices.Contains(args, "--selector=app in (oxide-csi-node,oxide-csi-controller)") {
		if k.noDriver {
			return []byte(listJSON()), nil
		}
		return []byte(listJSON(driverPodJSON, controllerPodJSON)), nil
	}
	return []byte(listJSON(podJSON)), nil
}

// healthyRack answers the questions about the volume's disk.
func healthyRack(t *testing.T) *rack.Client {
	disk := racktest.DiskOf(racktest.AttachedHere)
	return clientOf(t, racktest.Serve(t, racktest.OK(racktest.ViewProject, racktest.ProjectOf()),
		racktest.OK(racktest.ViewDisk, disk),
		racktest.OK("GET /v1/instances/"+racktest.Instance, racktest.InstanceOf("running")),
		racktest.OK("GET /v1/instances/"+racktest.Instance+"/disks", racktest.PageOf("next", disk))))
}

func clientOf(t *testing.T, url string) *rack.Client {
	t.Helper()
	client, closeIdle, err := rack.New(rack.Options{Host: url, Project: racktest.Project},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: racktest.Token,
			Log: slog.New(slog.DiscardHandler)}})
	csitest.Must(t, err)
	t.Cleanup(closeIdle)
	return client
}

// today is the time at which evidence is gathered; the objects of the tests are older.
func gather(t *testing.T, s Sources, o Options) Evidence {
	t.Helper()
	s.ClusterID, s.Version = "blue", "v1"
	e, err := Gather(t.Context(), s, o)
	csitest.Must(t, err)
	if time.Since(e.At) > time.Minute {
		t.Errorf("the evidence is of %s", e.At)
	}
	return e
}

func TestEveryQuestionIsAnsweredFromClusterRackAndNode(t *testing.T) {
	for _, q := range []Question{{AskClaim, "default", "data"}, {AskPod, "default", "db-0"},
		{Kind: AskVolume, Name: racktest.Disk}, {Kind: AskNode, Name: "worker-1"}} {
		t.Run(q.Kind, func(t *testing.T) {
			k := &cluster{t: t, report: theNode()}
			e := gather(t, Sources{Rack: healthyRack(t), Kubectl: k.kubectl},
				Options{Question: q, Kubectl: true})
			disk := e.Rack.Disks[racktest.Disk].Object
			if disk == nil || disk.FilesystemUUID != racktest.Disk || disk.Foreign != "" ||
				e.Rack.Neighbours[racktest.Instance].Object == nil {
				t.Errorf("got %+v", e.Rack)
			}
			d := Diagnose(e)
			if d.Status() != 0 {
				t.Errorf("status %d\n%s", d.Status(), text(d))
			}
			last := k.ran[len(k.ran)-1]
			if want := "exec --namespace=oxide-csi oxide-csi-node-x --container=oxide-plugin -- " +
				"/oxide-csi-plugin inspect --volume=" + racktest.Disk + "=" + diskName; last != want {
				t.Errorf("asked the node by %q, want %q", last, want)
			}
		})
	}
}

func TestTheEventsOfPersistentVolumesAreInTheDefaultNamespace(t *testing.T) {
	k := &cluster{t: t}
	gather(t, Sources{NoRack: "none", Kubectl: k.kubectl}, Options{Kubectl: true,
		Question: Question{AskClaim, "shop", "data"}})
	for _, namespace := range []string{"shop", "default"} {
		if !slices.Contains(k.ran, "get events --output=json --namespace="+namespace) {
			t.Errorf("asked %q", k.ran)
		}
	}
}

func TestB26NoSecretIsInTheEvidence(t *testing.T) {
	said := `MountVolume.MountDevice failed for volume "` + pvName + `" : ` + rpc("NodeToolFailed") +
		" with context=canary-flag, canary-flag, ro and oxide-token-canary"
	o := Options{Question: Question{AskClaim, "default", "data"}, Objects: writeFile(t,
		listJSON(claimJSON, pvJSON, attachmentJSON, csiNodeJSON, podJSON,
			`{"kind":"Secret","metadata":{"name":"oxide-csi"},"data":{"token":"canary"}}`,
			eventJSON(kindPod, "db-0", "FailedMount", said),
			eventJSON(kindPod, "db-0", "Pulled", "canary"))), NodeReports: []string{writeFile(t,
		strings.Replace(asJSON(t, theNode()), "{", `{"environment":"canary",`, 1))}}
	text := asJSON(t, gather(t, Sources{NoRack: "none"}, o))
	if strings.Contains(text, "canary") || !strings.Contains(text, "with ***, ***, ro and ***") ||
		!strings.Contains(text, "nvme1n1") {
		t.Error(text)
	}
}

func TestWhatKubectlMayNotSeeIsSaid(t *testing.T) {
	for forbidden, links := range map[string][]Link{
		"persistentvolumeclaims": {LinkClaim, LinkVolume, LinkAttachment, LinkDisk},
		"persistentvolumes":      {LinkVolume}, "volumeattachments": {LinkAttachment},
		"csinodes": {LinkNode}, "exec": {LinkDevice, LinkMounts}, "pods": {LinkPod}} {
		t.Run(forbidden, func(t *testing.T) {
			k := &cluster{t: t, forbidden: forbidden, report: theNode()}
			d := Diagnose(gather(t, Sources{NoRack: "OXIDE_HOST is not set", Kubectl: k.kubectl},
				Options{Question: Question{AskClaim, "default", "data"}, Kubectl: true}))
			for _, step := range d.Chains[0].Links {
				if d.Status() != 3 || slices.Contains(links, step.Link) && (step.State != Unseen ||
					!strings.Contains(step.What, "forbidden")) {
					t.Errorf("status %d, %+v\n%s", d.Status(), step, text(d))
				}
			}
		})
	}
}

func TestARackThatDoesNotAnswerIsUnseenUnlessItIsTheQuestion(t *testing.T) {
	d := Diagnose(gather(t, Sources{NoRack: "OXIDE_HOST is not set"},
		Options{Question: Question{Kind: AskRack}}))
	if d.Status() != 3 {
		t.Errorf("without a rack: status %d\n%s", d.Status(), text(d))
	}
	refused := racktest.Error(401, "Unauthorized", "no").To(racktest.ViewProject)
	for kind, want := range map[string]int{AskVolume: 3, AskRack: 2} {
		q := Question{Kind: kind}
		if kind == AskVolume {
			q.Name = racktest.Disk
		}
		client := clientOf(t, racktest.Serve(t, refused))
		d = Diagnose(gather(t, Sources{Rack: client}, Options{Question: q}))
		if d.Status() != want || !strings.Contains(text(d), string(csierr.TokenRejected)) {
			t.Errorf("%s: status %d\n%s", kind, d.Status(), text(d))
		}
	}
}

func TestADiskOrAnInstanceThatTheRackDoesNotHaveIsMissing(t *testing.T) {
	client := clientOf(t, racktest.Serve(t, racktest.OK(racktest.ViewProject, racktest.ProjectOf()),
		racktest.NotFound.To(racktest.ViewDisk)))
	e := gather(t, Sources{Rack: client}, Options{Question: Question{Kind: AskVolume,
		Name: racktest.Disk}})
	if !e.Rack.Disks[racktest.Disk].Missing() {
		t.Errorf("got %+v", e.Rack)
	}
	checkFinding(t, Diagnose(e), LinkDisk, csierr.VolumeNotFound)
}

func TestTheRackItselfIsAskedForItsDisksAndItsRoom(t *testing.T) {
	project := racktest.OK(racktest.ViewProject, racktest.ProjectOf())
	utilization := func(capacity, provisioned int) racktest.Exchange {
		const use = `{"cpus":1,"memory":1,"storage":%d}`
		return racktest.OK("GET /v1/utilization", fmt.Sprintf(`{"capacity":`+use+`,"provisioned":`+use+
			`}`, capacity, provisioned))
	}
	room := utilization(1<<40, 1<<39)
	const list = "GET /v1/disks"
	faulted := racktest.DiskOf("faulted", racktest.With("description", volume.Tag{Name: "pvc-1",
		Cluster: "blue", Claim: "shop/data"}.Description()))
	for name, test := range map[string]struct {
		lines  []racktest.Exchange
		status int
		says   string
	}{
		"in order": {[]racktest.Exchange{project, racktest.OK(list, racktest.PageOf("next",
			racktest.DiskOf("detached"))), racktest.OK(list, racktest.PageOf("")), room}, 0,
			"512 GiB left of the silo's quota"},
		"a fault": {[]racktest.Exchange{project, racktest.OK(list, racktest.PageOf("next", faulted)),
			racktest.OK(list, racktest.PageOf("")), room}, 2, "1 disks are faulted: " +
			volume.DiskName("blue", "pvc-1") + " (" + racktest.Disk + ") of the claim shop/data\n" +
			"  reason      DiskFaulted"},
		"full": {[]racktest.Exchange{project, racktest.OK(list, racktest.PageOf("")),
			utilization(1<<40, 1<<40-5)}, 2, "5 bytes are left of the silo's " +
			"quota, less than a volume of 1 GiB needs\n  reason      RackFull"},
		"no list": {[]racktest.Exchange{project, racktest.Error(500, "Internal", "no").To(list), room}, 3,
			"the disks of the cluster could not be seen: RackUnavailable"},
		"an invalid disk": {[]racktest.Exchange{project, racktest.OK(list, racktest.PageOf("next",
			racktest.DiskOf("detached", racktest.With("size", 0)))), room}, 3, "RackResponseInvalid"},
		"no room": {[]racktest.Exchange{project, racktest.OK(list, racktest.PageOf("")),
			racktest.OK("GET /v1/utilization", `{}`)}, 3, "what is left of the quota could not be seen"},
	} {
		t.Run(name, func(t *testing.T) {
			d := Diagnose(gather(t, Sources{Rack: clientOf(t, racktest.Serve(t, test.lines...))},
				Options{Question: Question{Kind: AskRack}}))
			if d.Status() != test.status || !strings.Contains(text(d), test.says) {
				t.Errorf("status %d\n%s", d.Status(), text(d))
			}
		})
	}
}

func TestANodeWithoutTheDriversPodIsNotAsked(t *testing.T) {
	k := &cluster{t: t, report: theNode(), noDriver: true}
	d := Diagnose(gather(t, Sources{NoRack: "none", Kubectl: k.kubectl}, Options{Kubectl: true,
		Question: Question{AskClaim, "default", "data"}}))
	if !strings.Contains(text(d), "no pod of the driver is on the node worker-1") {
		t.Error(text(d))
	}
}

func TestWhatDoesNotAnswerIsAskedOnce(t *testing.T) {
	looks := 0
	s := Sources{Rack: clientOf(t, racktest.Silent(t)), Timeout: 50 * time.Millisecond,
		Kubectl: func(ctx context.Context, _ ...string) ([]byte, error) {
			looks++
			<-ctx.Done()
			return nil, errors.New("killed")
		}}
	d := Diagnose(gather(t, s, Options{Question: Question{AskClaim, "default", "data"},
		Kubectl: true}))
	if looks != 1 || d.Status() != 3 || !strings.Contains(text(d), string(csierr.DeadlineExceeded)) {
		t.Errorf("%d looks, status %d\n%s", looks, d.Status(), text(d))
	}
}

func TestWithoutKubectlNothingOfTheClusterIsSeen(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	d := Diagnose(gather(t, Sources{NoRack: "none", Kubectl: kube.Kubectl}, Options{Kubectl: true,
		Question: Question{AskPod, "default", "db-0"}}))
	if d.Status() != 3 || !strings.Contains(text(d), "executable file not found") {
		t.Errorf("status %d\n%s", d.Status(), text(d))
	}
}

// writeFile writes a file for an option.
func writeFile(t testing.TB, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "file.json")
	csitest.Must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestFilesReplaceTheClusterAndTheNode(t *testing.T) {
	o := Options{Question: Question{AskClaim, "default", "data"}, Kubectl: true,
		Objects:     writeFile(t, allObjects()),
		NodeReports: []string{writeFile(t, asJSON(t, theNode()))}}
	e := gather(t, Sources{Rack: healthyRack(t)}, o)
	if d := Diagnose(e); d.Status() != 0 {
		t.Errorf("status %d\n%s", d.Status(), text(d))
	}
	if e.Cluster.Unseen[kindEvent] == "" || e.Cluster.Unseen[kindPod] != "" {
		t.Errorf("unseen: %v", e.Cluster.Unseen)
	}
	if pods := e.Nodes.DriverPods; len(pods) != 2 || pods[0].Metadata.Name != "oxide-csi-node-x" {
		t.Errorf("the driver's pods: %+v", pods)
	}
	for _, o := range e.Cluster.Objects {
		if o.Metadata.Name == "oxide-csi-node-x" || len(o.Spec.Drivers) > 1 {
			t.Errorf("kept what the question is not about: %+v", o)
		}
	}
}

func TestAFileThatCannotBeReadIsAnError(t *testing.T) {
	report := theNode()
	report.Format++
	for name, o := range map[string]Options{
		"no such file":         {Objects: "/nonexistent/objects"},
		"a directory":          {Objects: "/"},
		"objects that are cut": {Objects: writeFile(t, allObjects()[:100])},
		"no such report":       {NodeReports: []string{"/nonexistent/report"}},
		"a report that is cut": {NodeReports: []string{writeFile(t, `{"format":1`)}},
		"two reports":          {NodeReports: []string{writeFile(t, `{"format":1}{"format":1}`)}},
		"a later format":       {NodeReports: []string{writeFile(t, asJSON(t, report))}},
	} {
		o.Question = Question{AskClaim, "default", "data"}
		if _, err := Gather(t.Context(), Sources{NoRack: "none"}, o); err == nil ||
			!strings.HasPrefix(err.Error(), "--") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestQuestions(t *testing.T) {
	for args, want := range map[string]string{
		"pvc default/data": "pvc default/data", "pod a/b-0": "pod a/b-0",
		"node worker-1": "node worker-1",
		"volume " + strings.ToUpper(racktest.Disk): "volume " + racktest.Disk, "rack": "rack",
		"": "", "pvc": "", "pvc data": "", "pvc /data": "", "pvc default/": "", "pvc default/--all": "",
		"pod default/a/b": "", "volume data": "", "node --x": "", "node": "", "rack now": "",
		"pv x": "", "pvc default/data more": "",
	} {
		q, err := ParseQuestion(strings.Fields(args))
		switch {
		case (err == nil) != (want != ""):
			t.Errorf("%q: %v", args, err)
		case err == nil && q.String() != want:
			t.Errorf("%q: got %q", args, q)
		}
	}
}
