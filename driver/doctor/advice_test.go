package doctor

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/kube"
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
		if !ok || a.ByItself == "" || a.Do == "" || a.Next == "" || !slices.Contains(links, a.Link) {
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
	pod := kube.Object{Kind: kindPod, Metadata: kube.Metadata{Labels: kube.Labels{App: driverPodApp}},
		Spec: kube.Spec{NodeName: "worker-1"}}
	return &chain{Evidence: &Evidence{Nodes: Nodes{DriverPods: []kube.Object{pod}}}, pod: &pod,
		claim: &pod, volume: &pod, attachment: &pod, nodeName: "worker-1"}
}

// nothing matches what a page or an advice says where nobody has to do anything.
var nothing = regexp.MustCompile(`^Nothing[.;,]`)

func TestAnAdviceDoesNotContradictThePageOfReasons(t *testing.T) {
	page, err := os.ReadFile("../REASONS.md")
	if err != nil {
		t.Fatal(err)
	}
	entry := regexp.MustCompile("(?ms)^### `([A-Za-z0-9]+)`\n.*?^Do: (.+?)\n\n")
	found := entry.FindAllStringSubmatch(string(page)+"\n", -1)
	if len(found) < 70 {
		t.Fatalf("found %d entries", len(found))
	}
	for _, m := range found {
		a, does := advices[csierr.Reason(m[1])], strings.Join(strings.Fields(m[2]), " ")
		if nothing.MatchString(does) != nothing.MatchString(a.Do) {
			t.Errorf("%s: the page says %q, the advice %q", m[1], does, a.Do)
		}
		// What the page names in a person's task, the advice names too.
		for _, word := range regexp.MustCompile("OXIDE_[A-Z_]+").FindAllString(does, -1) {
			if !strings.Contains(a.Do, word) {
				t.Errorf("%s: the advice does not name %s: %q", m[1], word, a.Do)
			}
		}
	}
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
