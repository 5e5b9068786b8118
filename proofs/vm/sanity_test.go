//go:build linux

package vm_test

import (
	"context"
	"testing"

	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// TestCSISanityOfTheNodeServiceInAMachine runs csi-sanity's specs of the node service over one kind
// of volume. The node service is in a machine, in which csi-sanity makes its directories; the
// controller is outside.
func TestCSISanityOfTheNodeServiceInAMachine(t *testing.T) {
	if testing.Short() {
		t.Skip("SHORT= make vm runs it")
	}
	p := proof.New(t, "vm-csi-sanity")
	l := newLab(t, p)
	n := l.nodes[0]
	combination := csisuite.Combination{Split: true, Filesystem: filesystems[p.Rand().IntN(3)]}
	config := combination.Config()
	csisuite.Place(config, "/var/lib")
	config.ControllerAddress, config.Address = l.controllerAddress, "unix://"+n.path("sock")
	in := func(command, path string) (string, error) {
		out, err := n.run(context.WithoutCancel(t.Context()), nil, command+" "+path)
		return string(out), err
	}
	create := func(path string) (string, error) {
		_, err := in("mkdir", path)
		return path, err
	}
	remove := func(path string) error {
		_, err := in("rmdir", path)
		if err != nil {
			t.Error(err) // csi-sanity ignores it
		}
		return err
	}
	config.CreateTargetDir, config.CreateStagingDir = create, create
	config.RemoveTargetPath, config.RemoveStagingPath = remove, remove
	config.CheckPath = func(path string) (csisanity.PathKind, error) {
		kind, err := in("f() { stat -c %F $1 2>/dev/null || echo none; }; f", path)
		switch kind {
		case "directory\n":
			return csisanity.PathIsDir, err
		case "none\n":
			return csisanity.PathIsNotFound, err
		}
		return csisanity.PathIsOther, err
	}
	suite := csisanity.GinkgoTest(config)
	defer suite.Finalize()
	specs := 0
	ginkgo.ReportAfterSuite("count", func(r ginkgo.Report) {
		specs = r.SpecReports.WithLeafNodeType(types.NodeTypeIt).CountWithState(types.SpecStatePassed)
	})
	gomega.RegisterFailHandler(ginkgo.Fail)
	csisuite.Quiet()
	chosen, reporter := ginkgo.GinkgoConfiguration()
	chosen.FocusStrings, reporter.NoColor, reporter.SilenceSkips = []string{"Node Service"}, true, true
	passed := ginkgo.RunSpecs(t, "csi-sanity", chosen, reporter)
	mounts, err := in("grep -c /var/lib/ /proc/mounts || :", "")
	if err != nil || mounts != "0\n" || !passed || specs < 20 {
		t.Errorf("%d specs passed: %v; mounts are left: %q, %v", specs, passed, mounts, err)
	}
	p.Figure("kind", combination.Access(), "specs", specs)
}
