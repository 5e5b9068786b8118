//go:build linux

package machine_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

const id = "11111111-2222-4333-8444-555555555555"

// openHost returns a host, or skips the test where no machine can run.
func openHost(t *testing.T) *machine.Host {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	h, err := machine.Open(t.Context(), filepath.Join(cache, "oxide-simulator", "vm"))
	if err != nil {
		t.Skip(err)
	}
	return h
}

// start starts a machine that ends with the test.
func start(t *testing.T, h *machine.Host, dir string, disks ...machine.Disk) *machine.Machine {
	t.Helper()
	m, err := h.Start(t.Context(), dir, machine.Guest{ID: id, Name: "a", CPUs: 1,
		MemoryBytes: 512 << 20}, disks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Stop(context.WithoutCancel(t.Context())) })
	return m
}

// run runs a command in the guest, and waits until its sshd answers.
func run(t *testing.T, h *machine.Host, m *machine.Machine, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	for {
		c := exec.CommandContext(ctx, "ssh", "-i", h.Key(), "-p", strconv.Itoa(m.SSHPort()),
			"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o",
			"LogLevel=error", "root@127.0.0.1", command)
		var out, said bytes.Buffer
		c.Stdout, c.Stderr = &out, &said
		err := c.Run()
		if err == nil {
			return out.String()
		}
		if c.ProcessState.ExitCode() != 255 || ctx.Err() != nil {
			t.Fatalf("%s: %v: %s%s", command, err, out.String(), said.String())
		}
	}
}

// awaitIn runs a command in the guest until it prints the text.
func awaitIn(t *testing.T, h *machine.Host, m *machine.Machine, command, want string) {
	t.Helper()
	got := run(t, h, m, fmt.Sprintf("for i in $(seq 100); do x=$(%s); [ \"$x\" = '%s' ] && break; "+
		"sleep 0.1; done; echo \"$x\"", command, want))
	if strings.TrimSpace(got) != want {
		t.Fatalf("%s prints %q instead of %q", command, got, want)
	}
}

func newDisk(t *testing.T, name string, blockSize int) machine.Disk {
	t.Helper()
	d := machine.Disk{ID: uuid.NewString(), Serial: "serial-" + name, Path: filepath.Join(t.TempDir(), name),
		SizeBytes: 64 << 20, BlockSize: blockSize}
	if err := os.WriteFile(d.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(d.Path, d.SizeBytes); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestAMachineSeesItsDisksComeAndGo(t *testing.T) {
	h, dir := openHost(t), t.TempDir()
	cold, hot, stuck := newDisk(t, "cold", 512), newDisk(t, "hot", 4096), newDisk(t, "stuck", 2048)
	m := start(t, h, dir, cold)
	const serials = `cat /sys/block/*/device/serial | tr -d " " | sort | xargs`
	awaitIn(t, h, m, serials, "root serial-cold")
	if err := m.Plug(t.Context(), hot); err != nil {
		t.Fatal(err)
	}
	if err := m.Plug(t.Context(), stuck); err != nil {
		t.Fatal(err)
	}
	awaitIn(t, h, m, serials, "root serial-cold serial-hot serial-stuck")
	const find = `d=/dev/$(basename $(dirname $(dirname $(grep -l serial-hot /sys/block/*/device/serial))))`
	run(t, h, m, find+"; echo written | dd of=$d bs=4096 conv=sync,fsync")
	if b, err := os.ReadFile(hot.Path); err != nil || !bytes.HasPrefix(b, []byte("written\n")) {
		t.Fatalf("the disk's file begins with %q: %v", b[:10], err)
	}
	if err := m.Unplug(t.Context(), hot); err != nil {
		t.Fatal(err)
	}
	awaitIn(t, h, m, serials, "root serial-cold serial-stuck")

	port := m.SSHPort()
	if err := m.Release(); err != nil {
		t.Fatal(err)
	}
	m, err := machine.Find(t.Context(), dir, id)
	if err != nil || m == nil || m.SSHPort() != port {
		t.Fatalf("another process finds %v: %v", m, err)
	}
	if console, _, err := machine.Console(dir, 0, 1<<16); !bytes.Contains(console, []byte("is up")) {
		t.Errorf("the console shows %q: %v", console, err)
	}
	run(t, h, m, "busybox poweroff")
	<-m.Ended()
	if !m.PoweredOff() {
		t.Error("the guest has powered its machine off, and that is not seen")
	}
	if left, err := machine.Find(t.Context(), dir, id); left != nil || err != nil {
		t.Errorf("after its end there is %v: %v", left, err)
	}
}
