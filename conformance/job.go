package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// job is a run of a verb that works on a rack.
type job struct {
	*Program
	*settings
	id   string // the run's ID
	mark string // the cluster ID of the run's driver
	rack *rules.TestedRack
	// client is used for everything but the checks of the rules. It repeats requests while a rack is
	// busy.
	client      *oxide.Client
	projectName oxide.NameOrId
	budget      *budget
	// admin is the client of a simulated rack's admin listener, or nil.
	admin *adminapi.Client
	// here is the instance in which this program runs. second and helper are other instances, or nil.
	here, second, helper *oxide.Instance
	// known are the IDs of the disks that second and helper had at the preflight.
	known map[string]bool
	// dead are the IDs of the runs that clean removes.
	dead map[string]bool
	// started tells whether a check of data has started the helper. It is nil before these checks.
	started *data.Helper
	// latency is the median time of a small request to the rack.
	latency time.Duration

	// behaviours are sentences about what the rack does with the disks of running instances.
	behaviours []string

	// dir has the run's processes and their logs. It is nil until something runs.
	dir       *harness.Run
	calls     callLog
	exchanges []rules.RecordedCall
	progress  progress
	report    *report.Report
	// stopped is the reason why the run ended early. loss is the reason why the rack was lost, if it
	// was.
	stopped error
	loss    atomic.Pointer[error]
}

// openJob prepares the job. It sends no request to the rack.
func openJob(p *Program, s *settings) (*job, error) {
	// A rack may repeat the token in an error.
	secret := report.Redactor(s.token)
	p.Stdout = report.PlainWriter{To: p.Stdout, Redact: secret}
	p.Stderr = report.PlainWriter{To: p.Stderr, Redact: secret}
	w := &job{Program: p, settings: s, id: newRunID(), projectName: oxide.NameOrId(s.project)}
	w.mark = prefix + w.id
	w.budget = newBudget(s.budget)
	w.progress = progress{out: p.Stdout}
	if s.admin != "" {
		w.admin = &adminapi.Client{URL: s.admin}
	}
	w.report = &report.Report{Schema: report.SchemaVersion, CleanUp: w.cleanCommand(),
		Rack: report.RackFacts{Host: s.host, Project: s.project, APIVersion: rules.APIVersion,
			HotPlug: report.HotPlugUnknown, Release: s.release, Simulated: s.admin != ""}}
	var err error
	w.rack, err = rules.Open(rules.Config{Host: s.host, Token: s.token, Project: s.project,
		CAFile: s.caFile, Mark: w.id, Description: mark{Run: w.id}.description(), Admin: w.admin,
		Through: func(next http.RoundTripper) http.RoundTripper {
			return budgeted{next, w.budget, w.id}
		}})
	if err != nil {
		return nil, err
	}
	client := *w.rack.HTTP()
	client.Transport, client.Timeout = patient{client.Transport}, 0
	w.client, err = oxide.NewClient(oxide.WithHost(s.host), oxide.WithToken(s.token),
		oxide.WithHTTPClient(&client))
	if err != nil {
		return nil, fmt.Errorf("make a client of the rack: %w", err)
	}
	return w, nil
}

func (w *job) cleanCommand() string {
	return fmt.Sprintf("oxide-conformance clean --run %s", w.id)
}

// find reads an instance of the project by its ID or name.
func (w *job) find(ctx context.Context, nameOrID string) (*oxide.Instance, error) {
	params := oxide.InstanceViewParams{Instance: oxide.NameOrId(nameOrID)}
	if !isUUID(nameOrID) {
		params.Project = w.projectName
	}
	instance, err := w.client.InstanceView(ctx, params)
	if err != nil {
		return nil, fmt.Errorf("instance %s: %s", nameOrID, rules.Brief(err))
	}
	project, err := w.client.ProjectView(ctx, oxide.ProjectViewParams{Project: w.projectName})
	switch {
	case err != nil:
		return nil, fmt.Errorf("project %s: %s", w.projectName, rules.Brief(err))
	case project.Id != instance.ProjectId:
		return nil, fmt.Errorf("%s (%s) is not in the project %s", instance.Name, instance.Id,
			project.Name)
	}
	return instance, nil
}

// firmwareID reads the ID of the instance in which this program runs from its firmware.
func (s *settings) firmwareID() (string, error) {
	id, vendor, err := guest.Firmware(s.sysfsRoot)
	switch {
	case err != nil:
		return "", err
	case vendor != "Oxide":
		return "", fmt.Errorf("the firmware's vendor is %q, not Oxide", vendor)
	case !isUUID(id):
		return "", fmt.Errorf("the firmware's serial number is %q, not the UUID of an instance", id)
	}
	return id, nil
}

// These are the reasons why a run loses its rack. Later failures then prove nothing about the rack.
var (
	errAway  = errors.New("the rack does not answer any more")
	errToken = errors.New("the rack does not know the token any more: it has expired, or somebody " +
		"has deleted it; create another one with oxide auth login")
)

// lostAfter is the time after which a rack that is away, or refuses the token, counts as lost.
const lostAfter = 10 * time.Second

// lost returns the reason why the rack was lost, or nil.
func (w *job) lost() error {
	if err := w.loss.Load(); err != nil {
		return *err
	}
	return nil
}

// askRack asks the rack for an answer, and returns an error if the rack is lost. An error of the
// rack is an answer, unless it refuses the token.
func (w *job) askRack(ctx context.Context) error {
	if w.lost() != nil || ctx.Err() != nil {
		return w.lost()
	}
	loss := errAway
	asking, cancel := context.WithTimeout(ctx, lostAfter)
	defer cancel()
	err := harness.Await(asking, lostAfter, func() error {
		_, err := w.client.CurrentUserView(asking)
		var answered *oxide.HTTPError
		switch {
		case errors.Is(err, oxide.ErrHTTP401):
			loss = errToken
			return err
		case !errors.As(err, &answered):
			if asking.Err() == nil { // otherwise it had no time to answer
				loss = errAway
			}
			return err
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		w.loss.Store(&loss)
	}
	return w.lost()
}

// unlessLost turns a failure into an interruption if the rack is lost. It asks the rack only after
// a failure.
func (w *job) unlessLost(ctx context.Context, r report.Result) report.Result {
	if r.Status == report.Failed {
		if err := w.askRack(ctx); err != nil {
			r.Status, r.Reason = report.Interrupted, err.Error()
		}
	}
	return r
}
