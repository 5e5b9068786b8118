package sanity

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// Conformance runs the suite against the rack that OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT name,
// from inside one of its instances: it starts the driver on this machine, configured by the
// environment as in production, and touches only objects that carry the mark of this run. It
// returns the exit code of the program.
func Conformance(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	c := &conformance{stdout: stdout, mark: "conformance-" + uuid.NewString()[:8]}
	err := c.configure(args, stderr)
	if err == nil {
		err = c.all(ctx)
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "oxide-conformance: %v\n", err)
		return 1
	}
	return 0
}

// conformance is one run against one rack.
type conformance struct {
	stdout io.Writer
	// mark begins the names of everything the run makes, and is the driver's cluster ID.
	mark string
	// only is the label filter: which of the access types to run.
	only string

	run    *harness.Run
	client *oxide.Client
	driver *harness.Plugin
	skips  []explainedSkip
}

func (c *conformance) configure(args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("oxide-conformance", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&c.only, "only", "", "run only these of ext4, xfs, btrfs and block, "+
		"for example 'ext4 || block'")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var missing []string
	for _, variable := range []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_PROJECT"} {
		if os.Getenv(variable) == "" {
			missing = append(missing, variable)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("which rack? Set %s (OXIDE_CA_FILE too if its certificate is private), "+
			"and run this as root in an instance of that project", strings.Join(missing, ", "))
	}
	return nil
}

// all runs the suite from the first question to the rack to the sweep at the end.
func (c *conformance) all(ctx context.Context) (err error) {
	if c.run, err = harness.NewRun(c.stdout); err != nil {
		return err
	}
	defer func() {
		if err != nil && c.driver != nil {
			c.run.Failed() // before it is started there is no evidence
		}
		err = errors.Join(err, c.run.Close())
	}()
	host, token := os.Getenv("OXIDE_HOST"), os.Getenv("OXIDE_TOKEN")
	if c.client, err = harness.NewOxideClient(host, token, os.Getenv("OXIDE_CA_FILE")); err != nil {
		return err
	}
	if err := c.mayUseProject(ctx); err != nil {
		return err
	}
	c.run.Say("the mark of this run is %s", c.mark)
	if err := c.startDriver(ctx); err != nil {
		return err
	}
	suite := c.suite(ctx)
	left, sweep := c.sweep(ctx)
	if suite == nil && len(left) > 0 {
		suite = fmt.Errorf("the driver left what it should have deleted (it is swept now):\n  %s",
			strings.Join(left, "\n  "))
	}
	return errors.Join(suite, c.driver.Stop(), sweep)
}

func (c *conformance) mayUseProject(ctx context.Context) error {
	project := oxide.NameOrId(os.Getenv("OXIDE_PROJECT"))
	_, err := c.client.ProjectView(ctx, oxide.ProjectViewParams{Project: project})
	var refusal *oxide.HTTPError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &refusal):
		return fmt.Errorf("reach the rack that OXIDE_HOST names (OXIDE_CA_FILE names the "+
			"authority of a private certificate): %w", err)
	case errors.Is(err, oxide.ErrHTTP401):
		return fmt.Errorf("the rack that OXIDE_HOST names does not let OXIDE_TOKEN in: %w",
			brief(err))
	}
	return fmt.Errorf("ask the rack that OXIDE_HOST names for OXIDE_PROJECT: %w", brief(err))
}

// brief leaves the headers out of a rack's refusal, which the client's error prints in full.
func brief(err error) error {
	var refusal *oxide.HTTPError
	if errors.As(err, &refusal) && refusal.ErrorResponse != nil {
		return errors.New(refusal.ErrorResponse.Message)
	}
	return err
}

// startDriver starts the driver as the environment configures it.
func (c *conformance) startDriver(ctx context.Context) (err error) {
	env := map[string]string{}
	for _, entry := range os.Environ() {
		if key, value, _ := strings.Cut(entry, "="); strings.HasPrefix(key, "OXIDE_") {
			env[key] = value
		}
	}
	env["OXIDE_CLUSTER_ID"] = c.mark
	c.driver, err = c.run.StartPlugin(ctx, harness.PluginOptions{Env: env})
	return err
}

// suite asks whether the rack can hot-plug and runs csi-sanity accordingly.
func (c *conformance) suite(ctx context.Context) error {
	hotplug, err := c.hotplug(ctx)
	if err != nil {
		return fmt.Errorf("try to attach a disk: %w", err)
	}
	suiteConfig, reporterConfig := GinkgoConfiguration()
	suiteConfig.LabelFilter = c.only
	suiteConfig.PollProgressAfter = time.Minute
	reporterConfig.NoColor = true
	c.skips = csiSanitySkips
	if !hotplug {
		suiteConfig.SkipStrings = []string{skipPattern(attachSkips)}
		c.sayColdPlug()
	}
	RegisterFailHandler(Fail)
	quietCSISanity()
	c.register()
	auditSuite("conformance", c.skips, c.stdout)
	var result verdict
	RunSpecs(&result, "conformance of the rack at "+os.Getenv("OXIDE_HOST"),
		suiteConfig, reporterConfig)
	if result.failed {
		return errors.New("the rack, the driver or this machine does not conform: see above")
	}
	return nil
}

func (c *conformance) sayColdPlug() {
	c.run.Say("this rack refuses to attach a disk to a running instance; not run for that reason:")
	for _, skip := range attachSkips {
		c.run.Say("  %s", skip.spec)
	}
}

// verdict is what RunSpecs needs of a test outside go test.
type verdict struct{ failed bool }

// Fail notes that the suite failed.
func (v *verdict) Fail() { v.failed = true }

// register adds csi-sanity once per access type that this machine has the tools for.
func (c *conformance) register() {
	for _, combination := range combinations() {
		if combination.split {
			continue
		}
		if tool := "mkfs." + combination.filesystem; combination.filesystem != "" {
			if _, err := exec.LookPath(tool); err != nil {
				c.run.Say("%s is not run: %s is not installed", combination.access(), tool)
				continue
			}
		}
		config := combination.config()
		config.Address = c.driver.Endpoint
		config.DialOptions = append(config.DialOptions,
			grpc.WithChainUnaryInterceptor(withMark(c.mark)))
		place(config, c.driver.Dir)
		Describe("csi-sanity over "+combination.access(), Label(combination.access()), func() {
			csisanity.GinkgoTest(config)
		})
	}
}

// hotplug tries, through the driver, whether the rack attaches a disk to this running instance.
func (c *conformance) hotplug(ctx context.Context) (can bool, err error) {
	info, err := c.driver.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return false, err
	}
	controller := c.driver.Controller()
	created, err := controller.CreateVolume(ctx, harness.CreateRequest(c.mark+"-hotplug"))
	if err != nil {
		return false, err
	}
	volume := created.GetVolume()
	_, err = controller.ControllerPublishVolume(ctx,
		harness.PublishRequest(volume, info.GetNodeId()))
	can = err == nil
	if status.Code(err) == codes.FailedPrecondition {
		err = nil
	}
	if can {
		_, err = controller.ControllerUnpublishVolume(ctx,
			harness.UnpublishRequest(volume, info.GetNodeId()))
	}
	_, errDelete := controller.DeleteVolume(ctx,
		&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
	return can, errors.Join(err, errDelete)
}
