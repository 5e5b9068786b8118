package model

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

const (
	gib = int64(1) << 30
	// patience bounds whatever the site waits for, far beyond what it takes.
	patience = time.Minute
)

// site is what histories run on: a rack with three instances and an administrator's own disks, two
// controllers and a node driver in each instance. It outlives a history that ends clean.
type site struct {
	run         *harness.Run
	rack        *harness.Rack
	controllers []*harness.Plugin
	nodes       map[string]*harness.Plugin
	foreign     []*foreignDisk
	// halted are the nodes whose instance is stopped.
	halted map[string]bool
	// start is what there was before the first history.
	start harness.Ledger
}

// newSite starts a rack and its drivers.
func newSite(ctx context.Context, run *harness.Run) (*site, error) {
	rack, err := run.StartRack(ctx, harness.RackOptions{Instances: nodes})
	if err != nil {
		return nil, err
	}
	s := &site{run: run, rack: rack, nodes: map[string]*harness.Plugin{},
		halted: map[string]bool{}}
	if err := s.makeForeign(ctx); err != nil {
		return nil, err
	}
	if err := s.startDrivers(ctx); err != nil {
		return nil, err
	}
	s.start, err = s.ledger(ctx)
	return s, err
}

func (s *site) startDrivers(ctx context.Context) error {
	for range 2 {
		p, err := s.rack.StartPlugin(ctx, harness.PluginOptions{Mode: harness.ModeController})
		if err != nil {
			return err
		}
		s.controllers = append(s.controllers, p)
	}
	for _, n := range nodes {
		var err error
		s.nodes[n], err = s.rack.StartPlugin(ctx, harness.PluginOptions{
			Mode: harness.ModeNode, Instance: n, Args: []string{"--device-timeout=1s"}})
		if err != nil {
			return err
		}
	}
	for _, p := range s.plugins() {
		if err := ready(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// ledger takes stock. A foreign disk's device is another one after its instance was started again,
// which is no leak.
func (s *site) ledger(ctx context.Context) (harness.Ledger, error) {
	ledger, err := s.rack.Ledger(ctx, s.plugins()...)
	for name, count := range ledger {
		if plain := loopNumber.ReplaceAllString(name, "loop device on"); plain != name {
			delete(ledger, name)
			ledger[plain] += count
		}
	}
	return ledger, err
}

var loopNumber = regexp.MustCompile(`^loop device loop\d+ on`)

// balance waits until there is no more than at the start.
func (s *site) balance(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return await(ctx, func() error {
		now, err := s.ledger(ctx)
		if err != nil {
			return err
		}
		if more := now.More(s.start); len(more) > 0 {
			return fmt.Errorf("more than at the start:\n  %s", strings.Join(more, "\n  "))
		}
		return nil
	})
}

// ready waits until a driver says that it is.
func ready(ctx context.Context, p *harness.Plugin) error {
	return await(ctx, func() error {
		resp, err := p.Identity().Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !resp.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	})
}

// await asks until there is no error.
func await(ctx context.Context, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it stays so: %w", err)
		case <-time.After(pause):
		}
	}
}

func (s *site) plugins() []*harness.Plugin {
	all := slices.Clone(s.controllers)
	for _, n := range nodes {
		all = append(all, s.nodes[n])
	}
	return all
}

// running are the drivers that run.
func (s *site) running() []*harness.Plugin {
	all := slices.Clone(s.controllers)
	for _, n := range nodes {
		if !s.halted[n] {
			all = append(all, s.nodes[n])
		}
	}
	return all
}

// staging and target are the CO's paths on a node.
func (s *site) staging(v int, n string) string {
	return filepath.Join(s.nodes[n].Dir, "kubelet", fmt.Sprintf("v%d", v), "globalmount")
}

func (s *site) target(v int, n string, p int) string {
	return filepath.Join(s.nodes[n].Dir, "kubelet", fmt.Sprintf("pod-%d", p), fmt.Sprintf("v%d", v))
}

// close stops everything. Whatever a failed history has left goes with the mount namespace.
func (s *site) close() error {
	var errs []error
	for _, p := range s.plugins() {
		errs = append(errs, p.Stop())
	}
	return errors.Join(append(errs, s.rack.Stop())...)
}

// abandon gives up a site on which a history failed: the evidence stays, the processes go.
func (s *site) abandon() {
	s.run.Failed()
	for _, p := range s.plugins() {
		p.Kill()
	}
	unmountBelow(s.rack.Dir)
	_ = s.rack.Terminate() // it may be dead, and the history's failure is told already
	freeLoops(filepath.Join(s.rack.Dir, "sim"), func(string) bool { return true })
}

// scrub removes by force what a history has left that was lied to, so that the next one need not
// wait for a new site. An error says that the site is not fit for it.
func (s *site) scrub(ctx context.Context) error {
	for _, n := range nodes {
		kubelet := filepath.Join(s.nodes[n].Dir, "kubelet")
		unmountBelow(kubelet)
		if err := os.RemoveAll(kubelet); err != nil {
			return err
		}
	}
	j := &joint{facts: facts{}, serials: map[int]string{}}
	if err := s.observeRack(ctx, j); err != nil {
		return err
	}
	for v := range kinds {
		id, holder := j.facts[diskField(v)], j.facts[holderField(v)]
		if id == "" {
			continue
		}
		if holder != "" {
			if err := s.attachRaw(ctx, id, holder, false); err != nil {
				return err
			}
		}
		err := s.rack.Client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)})
		if err != nil {
			return err
		}
	}
	for _, d := range slices.Clone(s.foreign) {
		if d.of == 0 {
			continue
		}
		if err := s.takeForeign(ctx, d); err != nil {
			return err
		}
	}
	fake := filepath.Join(s.rack.Instance("b").Guest, "sys/block", fakeDevice)
	if err := os.RemoveAll(fake); err != nil {
		return err
	}
	freeLoops(filepath.Join(s.rack.Dir, "sim"), func(path string) bool {
		return !slices.ContainsFunc(s.foreign, func(d *foreignDisk) bool { return d.path == path })
	})
	return newHistory(s).look(ctx, nil)
}

// freeLoops releases the loop devices of files below a directory: a history that failed may have
// left more than the rack knows of.
func freeLoops(dir string, goes func(path string) bool) {
	loops, err := livingLoops(dir)
	if err != nil {
		panic(err) // sysfs can be read
	}
	for path, devices := range loops {
		for _, device := range devices {
			if goes(path) {
				// One that is in use goes with its last user.
				_ = exec.Command("losetup", "--detach", "/dev/"+device).Run()
			}
		}
	}
}

// quiet waits until no driver and not the rack works on a request.
func (s *site) quiet(ctx context.Context, rackDown bool) error {
	return await(ctx, func() error {
		if !rackDown {
			err := idle(ctx, http.DefaultTransport, s.rack.Admin.URL, "simulator.(*Server).handle+")
			if err != nil {
				return fmt.Errorf("the rack: %w", err)
			}
		}
		for _, p := range s.running() {
			socket := filepath.Join(p.Dir, "metrics.sock")
			transport := &http.Transport{DisableKeepAlives: true,
				DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return (&net.Dialer{}).DialContext(ctx, "unix", socket)
				}}
			if err := idle(ctx, transport, "http://plugin", "_Handler+"); err != nil {
				return fmt.Errorf("%s: %w", p.LogFile, err)
			}
		}
		return nil
	})
}

// idle asks a program for what its goroutines do, and looks whether one of them serves a request.
func idle(ctx context.Context, transport http.RoundTripper, url, mark string) error {
	text, err := get(ctx, transport, url+"/debug/pprof/goroutine?debug=1")
	if err != nil {
		return err
	}
	if i := bytes.Index(text, []byte(mark)); i >= 0 {
		return fmt.Errorf("still at work: %.200s", text[i:])
	}
	return nil
}

func get(ctx context.Context, transport http.RoundTripper, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true // so that the ledger does not count our connection
	resp, err := (&http.Client{Transport: transport, Timeout: patience}).Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", url, resp.Status, text)
	}
	return text, err
}

// activeFaults are the rules that may still strike, by name.
func (s *site) activeFaults(ctx context.Context, names map[string]string) ([]string, error) {
	rules, err := s.rack.Admin.Faults(ctx)
	if err != nil {
		return nil, err
	}
	var left []string
	for _, r := range rules {
		if r.Fired == 0 {
			left = append(left, names[r.ID])
		}
	}
	return left, nil
}

// power stops or starts an instance, and waits for it.
func (s *site) power(ctx context.Context, n string, on bool) error {
	id := oxide.NameOrId(s.rack.Instance(n).ID)
	want := oxide.InstanceStateStopped
	var err error
	if on {
		want = oxide.InstanceStateRunning
		_, err = s.rack.Client.InstanceStart(ctx, oxide.InstanceStartParams{Instance: id})
	} else {
		_, err = s.rack.Client.InstanceStop(ctx, oxide.InstanceStopParams{Instance: id})
	}
	if err != nil {
		return err
	}
	return await(ctx, func() error {
		i, err := s.rack.Client.InstanceView(ctx, oxide.InstanceViewParams{Instance: id})
		if err == nil && i.RunState != want {
			err = fmt.Errorf("instance %s is %s", n, i.RunState)
		}
		return err
	})
}

// halt is what the end of an instance means for its guest: the driver and all mounts are gone.
func (s *site) halt(ctx context.Context, n string) error {
	if err := s.power(ctx, n, false); err != nil {
		return err
	}
	s.nodes[n].Kill()
	s.halted[n] = true
	unmountBelow(filepath.Join(s.nodes[n].Dir, "kubelet"))
	return nil
}

func (s *site) boot(ctx context.Context, n string) error {
	if err := s.power(ctx, n, true); err != nil {
		return err
	}
	s.halted[n] = false
	return s.nodes[n].Start(ctx)
}

// name is what the CO calls a volume or a snapshot.
func name(kind string, number int) string { return fmt.Sprintf("model-%s%d", kind, number) }

// named says whether a description on the rack is that of the CO's name.
func named(description, name string) bool {
	return strings.Contains(description, `"`+name+`"`)
}
