package doctor

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

func TestEveryReasonHasAnAdvice(t *testing.T) {
	known := csierr.Reasons()
	c := chain{Evidence: &Evidence{}}
	links := []Link{""}
	for _, l := range volumeLinks {
		links = append(links, l.link)
	}
	for _, reason := range known {
		a, ok := advices[reason]
		if !ok || a.ByItself == "" || a.Next == "" || !slices.Contains(links, a.Link) {
			t.Errorf("%s: incomplete or missing: %+v", reason, a)
		}
		// Every word that stands for a name is one that a chain may know.
		for _, word := range placeholder.FindAllString(a.Next, -1) {
			if _, ok := fullChain().names()[strings.Trim(word, "{}")]; !ok {
				t.Errorf("%s: nothing has the name %s", reason, word)
			}
		}
		if got := c.commandAt("", a.Next); strings.ContainsAny(got, "{}") {
			t.Errorf("%s: %s", reason, got)
		}
	}
	for reason := range advices {
		if !slices.Contains(known, reason) {
			t.Errorf("%s is no reason of the driver", reason)
		}
	}
}

// fullChain is a chain that knows every name.
func fullChain() *chain {
	pod := kube.Object{Kind: kindPod, Metadata: kube.Metadata{OwnerReferences: []kube.Owner{
		{Kind: kindDaemonSet, Controller: true}}}, Spec: kube.Spec{NodeName: "worker-1"}}
	return &chain{Evidence: &Evidence{Nodes: Nodes{DriverPods: []kube.Object{pod}}}, pod: &pod,
		claim: &pod, volume: &pod, attachment: &pod, nodeName: "worker-1"}
}

func TestNoCommandOfAnAdviceChangesAnything(t *testing.T) {
	reads := regexp.MustCompile(`^(kubectl (get|describe|logs|exec|debug) |oxide (disk|instance) ` +
		`(view|disk list) |oxide-csi-plugin (doctor|audit) )`)
	for reason, a := range advices {
		if !reads.MatchString(a.Next) || strings.Contains(a.Next, "--delete") {
			t.Errorf("%s: %s", reason, a.Next)
		}
	}
}
