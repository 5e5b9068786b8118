//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// doctor runs oxide-csi-plugin doctor on this machine, with a copy of the nodes' binary.
type doctor struct{ env []string }

// doctorDir contains copies of that binary and of the cluster's kubectl. It is empty before the
// first use.
var doctorDir string

// diagnoses counts the diagnoses of the whole suite, and the links that the doctors could not
// check.
var diagnoses struct{ asked, right, unseen int }

var _ = AfterSuite(func() {
	if d := diagnoses; d.asked > 0 {
		fmt.Printf("FIGURE doctor-cluster situations=%d right=%d wrong=%d could_not_see=%d\n", d.asked,
			d.right, d.asked-d.right, d.unseen)
	}
})

// newDoctor returns a doctor. The first call copies its programs from the nodes, so call it before
// the spec disturbs anything.
func newDoctor(ctx context.Context) doctor {
	if doctorDir == "" {
		dir := filepath.Join(config.work, "doctor")
		Expect(os.MkdirAll(dir, 0o755)).To(Succeed())
		p := installedPod(ctx, ofNode, workers[0])
		copyFrom(ctx, controlPlane, `cat "$(command -v kubectl)"`, filepath.Join(dir, "kubectl"))
		copyFrom(ctx, workers[0], "cat /proc/"+processOf(ctx, p, "oxide-plugin")+"/exe",
			filepath.Join(dir, "oxide-csi-plugin"))
		doctorDir = dir
	}
	return doctor{append(append(harness.Environ(), rackVariables()...), "OXIDE_TOKEN="+rackToken,
		"PATH="+doctorDir+":"+os.Getenv("PATH"), "KUBECONFIG="+filepath.Join(config.work, "kubeconfig"))}
}

// copyFrom writes the output of a script in a node to an executable file.
func copyFrom(ctx context.Context, node, script, path string) {
	file := must(os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755))
	Expect(machines[node].CommandContext(ctx, "sh", "-c", script).SetStdout(file).Run()).To(Succeed())
	Expect(file.Close()).To(Succeed())
}

// command returns a command of the program.
func (d doctor) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(doctorDir, "oxide-csi-plugin"), args...)
	cmd.Env, cmd.Stderr = d.env, GinkgoWriter
	return cmd
}

// firstFinding returns the link, the reason and the text of the first finding, or "".
func firstFinding(d harness.Diagnosis) (link, reason, wrong string) {
	for _, c := range d.Chains {
		if c.Finding.Link != "" {
			return c.Finding.Link, c.Finding.Reason, c.Finding.Wrong
		}
	}
	return "", "", ""
}

// ask asks the doctor a question, such as pvc NAMESPACE/NAME.
func (d doctor) ask(ctx context.Context, question []string) (said harness.Diagnosis, err error) {
	// If it finds something, its exit status is not zero.
	out, failed := d.command(ctx, append([]string{"doctor", "--output=json"}, question...)...).Output()
	if err := json.Unmarshal(out, &said); err != nil || len(said.Chains) == 0 {
		return said, fmt.Errorf("the doctor said %q: %w, %w", out, failed, err)
	}
	fmt.Fprintf(GinkgoWriter, "%s\n", out)
	return said, nil
}

// finds waits until the doctor reports this link and reason first, because Kubernetes shows some
// things late.
func (d doctor) finds(ctx context.Context, link, reason string, question ...string) {
	diagnoses.asked++
	var said harness.Diagnosis
	Eventually(func(g Gomega) {
		var err error
		said, err = d.ask(ctx, question)
		g.Expect(err).NotTo(HaveOccurred())
		foundLink, foundReason, wrong := firstFinding(said)
		g.Expect([]string{foundLink, foundReason}).To(Equal([]string{link, reason}), wrong)
	}).WithContext(ctx).Should(Succeed(), "the doctor asked about %v", question)
	diagnoses.right++
	diagnoses.unseen += len(said.Unseen())
}

// findsNothing checks that the doctor finds nothing broken, and returns the links that it could not
// check.
func (d doctor) findsNothing(ctx context.Context, question ...string) (unseen []string) {
	diagnoses.asked++
	said := must(d.ask(ctx, question))
	link, reason, wrong := firstFinding(said)
	Expect(link).To(BeEmpty(), "the doctor asked about %v finds %s: %s", question, reason, wrong)
	diagnoses.right++
	unseen = said.Unseen()
	diagnoses.unseen += len(unseen)
	return unseen
}

// path returns the name of an object of the spec's namespace as NAMESPACE/NAME.
func (f *fixture) path(name string) string { return f.ns + "/" + name }
