package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// A Docker engine turns on packet forwarding and adds filter rules, and leaves both when it ends.
// The functions in this file restore the network of a machine that had no engine.

// network contains the settings of the machine that an engine changes.
type network struct {
	// Rules contains the rules of each table, as iptables lists them.
	Rules map[table][]string
	// Forward is the value of net.ipv4.ip_forward.
	Forward string
}

// table is a table of rules: the program that lists it, and the table's name.
type table struct{ Program, Name string }

func (t table) MarshalText() ([]byte, error) { return []byte(t.Program + " " + t.Name), nil }

func (t *table) UnmarshalText(text []byte) error {
	t.Program, t.Name, _ = strings.Cut(string(text), " ")
	return nil
}

const forwardFile = "/proc/sys/net/ipv4/ip_forward"

var tables = []table{
	{"iptables", "filter"}, {"iptables", "nat"}, {"ip6tables", "filter"}, {"ip6tables", "nat"},
}

// networkFile is the file that exists from an engine's start until its orderly end.
func (d *daemon) networkFile() string { return d.file("network.json") }

// remember records the network before our engine runs. If an engine of ours was killed, its record
// is kept, because it is still the right one.
func (d *daemon) remember(ctx context.Context) error {
	if exists(d.networkFile()) {
		return nil
	}
	text, err := json.MarshalIndent(readNetwork(ctx), "", "  ")
	if err != nil {
		return fmt.Errorf("write down the network as it is: %w", err)
	}
	if err := os.WriteFile(d.networkFile(), text, 0o600); err != nil {
		return fmt.Errorf("write down the network as it is: %w", err)
	}
	return nil
}

// giveBack restores the network. While another engine runs, it does nothing, because that engine
// uses the rules.
func (d *daemon) giveBack(ctx context.Context) error {
	text, err := os.ReadFile(d.networkFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read how the network was: %w", err)
	}
	var before network
	if err := json.Unmarshal(text, &before); err != nil {
		return fmt.Errorf("read how the network was: %w", err)
	}
	if other := otherEngine(); other != 0 {
		fmt.Fprintf(d.log, "engine: another Docker engine runs, process %d: rules of iptables stay\n",
			other)
	} else if err := restore(ctx, before, readNetwork(ctx)); err != nil {
		return err
	}
	return os.Remove(d.networkFile())
}

// otherEngine returns the process ID of a dockerd on this machine, or zero. Our own has ended by
// then: even if it is still a zombie, it has no command line.
func otherEngine() int {
	found, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range found {
		line, err := os.ReadFile(file)
		program, _, _ := strings.Cut(string(line), "\x00")
		if err == nil && filepath.Base(program) == "dockerd" {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			return pid
		}
	}
	return 0
}

// readNetwork reads the network. A table that cannot be read does not exist, so there is nothing in
// it to restore.
func readNetwork(ctx context.Context) network {
	now := network{Rules: map[table][]string{}}
	if text, err := os.ReadFile(forwardFile); err == nil {
		now.Forward = strings.TrimSpace(string(text))
	}
	for _, t := range tables {
		out, err := exec.CommandContext(ctx, t.Program, "-w", "-t", t.Name, "-S").Output()
		if err == nil {
			now.Rules[t] = strings.Split(strings.TrimSpace(string(out)), "\n")
		}
	}
	return now
}

func restore(ctx context.Context, before, now network) error {
	var problems []error
	for t, rules := range now.Rules {
		old, known := before.Rules[t]
		if !known {
			continue
		}
		for _, change := range undo(old, rules) {
			args := append([]string{"-w", "-t", t.Name}, change...)
			if out, err := exec.CommandContext(ctx, t.Program, args...).CombinedOutput(); err != nil {
				problems = append(problems, fmt.Errorf("%s %s: %w: %s", t.Program,
					strings.Join(args, " "), err, tail(out)))
			}
		}
	}
	if before.Forward == "0" && now.Forward != "0" {
		problems = append(problems, os.WriteFile(forwardFile, []byte("0"), 0))
	}
	return errors.Join(problems...)
}

// undo returns the changes that remove an engine's rules from a table: first the rules that lead to
// its chains, then the chains, then the policy that it set. It keeps rules that were there before,
// and rules that do not belong to an engine.
func undo(before, now []string) [][]string {
	var rules, flushed, removed, policies [][]string
	for _, line := range now {
		if slices.Contains(before, line) {
			continue
		}
		// iptables quotes like a shell, but no rule of an engine contains a word with a space.
		words := strings.Fields(line)
		switch {
		case len(words) == 3 && words[0] == "-P":
			if old := policy(before, words[1]); old != nil {
				policies = append(policies, old)
			}
		case len(words) == 2 && words[0] == "-N" && isDocker(words[1]):
			flushed = append(flushed, []string{"-F", words[1]})
			removed = append(removed, []string{"-X", words[1]})
		case len(words) > 2 && words[0] == "-A" && !isDocker(words[1]) && leadsToDocker(words):
			rules = append(rules, append([]string{"-D"}, words[1:]...))
		}
	}
	return slices.Concat(rules, flushed, removed, policies)
}

func isDocker(chain string) bool { return strings.HasPrefix(chain, "DOCKER") }

func leadsToDocker(rule []string) bool {
	i := slices.Index(rule, "-j")
	return i >= 0 && i+1 < len(rule) && isDocker(rule[i+1])
}

func policy(rules []string, chain string) []string {
	for _, line := range rules {
		if words := strings.Fields(line); len(words) == 3 && words[0] == "-P" && words[1] == chain {
			return words
		}
	}
	return nil
}
