//go:build linux

package vm_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// instance is an instance of a rack of virtual machines, without the driver.
type instance struct {
	*testing.T
	*harness.Rack
	id, key string
}

// machine returns what the rack says of the instance's machine, or nil if it has none.
func (i instance) machine() *adminapi.Machine {
	i.Helper()
	state, err := i.Admin.State(i.Context())
	i.must(err)
	for _, m := range state.Machines {
		if m.InstanceID == i.id {
			return &m
		}
	}
	return nil
}

func (i instance) must(err error) {
	i.Helper()
	if err != nil {
		i.Fatal(err)
	}
}

// await waits until the rack says that the instance is in a state.
func (i instance) await(state oxide.InstanceState) {
	i.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(bootTime); ; <-tick.C {
		seen, err := i.Client.InstanceView(i.Context(),
			oxide.InstanceViewParams{Instance: oxide.NameOrId(i.id)})
		i.must(err)
		if seen.RunState == state {
			return
		}
		if time.Now().After(end) {
			i.Fatalf("the instance is %s, not %s", seen.RunState, state)
		}
	}
}

// in runs a command in the guest.
func (i instance) in(command string) string {
	i.Helper()
	m := i.machine()
	if m == nil {
		i.Fatal("the instance has no machine")
	}
	return strings.TrimSpace(sshd{m.SSH, i.key}.run(i.T, command))
}

// sees waits until the guest sees these NVMe devices, by their serials.
func (i instance) sees(serials string) {
	i.Helper()
	got := i.in(fmt.Sprintf(`for try in $(seq 100); do `+
		`seen=$(cat /sys/block/*/device/serial | tr -d " " | sort | xargs); `+
		`[ "$seen" = "%s" ] && break; sleep 0.1; done; echo "$seen"`, serials))
	if got != serials {
		i.Fatalf("the guest sees %q instead of %q", got, serials)
	}
}

// post calls the rack's API, and demands the status.
func (i instance) post(status int, path, body string) {
	i.Helper()
	request, err := http.NewRequestWithContext(i.Context(), http.MethodPost, i.URL+path,
		strings.NewReader(body))
	i.must(err)
	request.Header.Set("Authorization", "Bearer "+i.Token)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	i.must(err)
	defer response.Body.Close()
	if response.StatusCode != status {
		var said bytes.Buffer
		_, _ = said.ReadFrom(response.Body)
		i.Fatalf("%s: %s instead of %d: %s", path, response.Status, status, said.String())
	}
}

// console returns the last bytes of the serial console as the rack's API has them.
func (i instance) console() (string, error) {
	got, err := i.Client.InstanceSerialConsole(i.Context(), oxide.InstanceSerialConsoleParams{
		Instance: oxide.NameOrId(i.id), MostRecent: oxide.NewPointer(uint64(1 << 16))})
	if err != nil {
		return "", err
	}
	text := make([]byte, len(got.Data))
	for n, b := range got.Data {
		text[n] = byte(b)
	}
	return string(text), nil
}

// qemu is a pattern of the command line of the instance's machine.
func (i instance) qemu() string { return "qemu.*serial=" + i.id }

// killQEMU kills the machine of the instance from outside.
func (i instance) killQEMU() {
	i.Helper()
	i.must(exec.CommandContext(i.Context(), "pkill", "-KILL", "-f", i.qemu()).Run())
}

func TestAnInstanceRunsAsAVirtualMachine(t *testing.T) {
	image := imageDir(t)
	rack, err := harness.RunFor(t).StartRack(t.Context(), harness.RackOptions{Instances: []string{},
		Args: []string{"--guests=vm", "--vm-image", image, "--keep-devices"}})
	if err != nil {
		t.Fatal(err)
	}
	i := instance{T: t, Rack: rack, key: filepath.Join(t.TempDir(), "key")}
	t.Cleanup(func() { // the rack leaves its machines running
		if i.id != "" {
			_ = exec.Command("pkill", "-KILL", "-f", i.qemu()).Run()
		}
		if err := rack.Stop(); err != nil {
			t.Error(err)
		}
	})
	i.must(exec.CommandContext(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
		i.key).Run())
	public, err := os.ReadFile(i.key + ".pub")
	i.must(err)
	i.post(http.StatusCreated, "/v1/me/ssh-keys", fmt.Sprintf(
		`{"name":"mine","description":"","public_key":%q}`, strings.TrimSpace(string(public))))
	const size = 1 << 30
	disk := func(name string) *oxide.Disk {
		d, err := i.CreateDisk(t.Context(), i.Project, name, size)
		i.must(err)
		return d
	}
	cold, hot := disk("cold"), disk("hot")

	// A user's key opens the guest, and a disk of the creation is there.
	made, err := i.Client.InstanceCreate(t.Context(), oxide.InstanceCreateParams{
		Project: oxide.NameOrId(i.Project), Body: &oxide.InstanceCreate{Name: "a", Hostname: "a",
			Ncpus: 1, Memory: 1 << 30, Start: oxide.NewPointer(true),
			Disks: []oxide.InstanceDiskAttachment{{Value: &oxide.InstanceDiskAttachmentAttach{
				Name: cold.Name}}}}})
	i.must(err)
	i.id = made.Id
	i.await(oxide.InstanceStateRunning)
	i.sees("cold root")
	if name, id := i.in("hostname"), i.in("cat /sys/class/dmi/id/product_serial"); name != "a" ||
		id != i.id {
		t.Errorf("the guest is %s, its firmware's %s", name, id)
	}

	// Disks come and go while it runs; what it has flushed is in a snapshot.
	i.must(i.AttachDisk(t.Context(), hot.Id, i.id))
	i.sees("cold hot root")
	text := base64.StdEncoding.EncodeToString([]byte(uuid.NewString()))
	i.in(`for d in /sys/block/nvme*n1; do grep -q hot $d/device/serial && ` +
		`echo ` + text + ` | dd of=/dev/$(basename $d) bs=4096 conv=sync,fsync; done`)
	_, err = i.Client.SnapshotCreate(t.Context(), oxide.SnapshotCreateParams{
		Project: oxide.NameOrId(i.Project),
		Body:    &oxide.SnapshotCreate{Name: "s", Disk: oxide.NameOrId(hot.Id)}})
	i.must(err)
	files, err := filepath.Glob(filepath.Join(rack.Dir, "sim", "snapshots", "*.img"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	kept := make([]byte, len(text))
	f, err := os.Open(files[0])
	i.must(err)
	defer f.Close()
	if _, err := f.Read(kept); err != nil || string(kept) != text {
		t.Errorf("the snapshot begins with %q, not with %q: %v", kept, text, err)
	}
	i.must(i.DetachDisk(t.Context(), hot.Id, i.id))
	i.sees("cold root")

	// The machine outlives the simulator, which finds it again: the same boot, the same places.
	const bootID = "cat /proc/sys/kernel/random/boot_id"
	boot := i.in(bootID)
	rack.Kill()
	dir := filepath.Join(rack.Dir, "sim", "guests", i.id, "machine")
	found, err := machine.Find(t.Context(), dir, i.id)
	i.must(err)
	i.must(found.Plug(t.Context(), machine.Disk{ID: uuid.NewString(), Serial: "unknown",
		Path: files[0], SizeBytes: size, BlockSize: 512, ReadOnly: true}))
	i.must(errors.Join(found.Pause(t.Context()), found.Release()))
	i.must(rack.Start(t.Context()))
	i.sees("cold root") // and no disk of which the records do not know
	if again := i.in(bootID); again != boot {
		t.Errorf("the next simulator finds boot %s, not %s", again, boot)
	}
	if text, err := i.console(); err != nil || !strings.Contains(text, "the guest is up") {
		t.Errorf("the serial console says %q: %v", text, err)
	}
	// So does a reboot, of which the guest notices everything.
	_, err = i.Client.InstanceReboot(t.Context(),
		oxide.InstanceRebootParams{Instance: oxide.NameOrId(i.id)})
	i.must(err)
	for i.in(bootID) == boot { // the kernel of before answers until the reset
	}
	i.sees("cold root")

	// A machine that is killed is an instance that failed, also while no simulator runs.
	i.killQEMU()
	i.await(oxide.InstanceStateFailed)
	start := func() {
		t.Helper()
		_, err := i.Client.InstanceStart(t.Context(),
			oxide.InstanceStartParams{Instance: oxide.NameOrId(i.id)})
		i.must(err)
		i.await(oxide.InstanceStateRunning)
	}
	start()
	rack.Kill()
	i.killQEMU()
	i.must(rack.Start(t.Context()))
	i.await(oxide.InstanceStateFailed)

	// What its root filesystem has, and what is attached while it is off, is there after a boot.
	start()
	i.in("touch /kept; sync; poweroff")
	i.await(oxide.InstanceStateStopped)
	if _, err := i.console(); err == nil || !strings.Contains(err.Error(),
		"has no active serial console server") {
		t.Errorf("a stopped instance has a serial console: %v", err)
	}
	i.must(i.AttachDisk(t.Context(), hot.Id, i.id))
	start()
	i.sees("cold hot root")
	i.in("ls /kept")
	_, err = i.Client.InstanceStop(t.Context(),
		oxide.InstanceStopParams{Instance: oxide.NameOrId(i.id)})
	i.must(err)
	i.await(oxide.InstanceStateStopped)
	if m := i.machine(); m != nil {
		t.Errorf("a stopped instance has a machine: %+v", m)
	}
	i.must(i.Client.InstanceDelete(t.Context(),
		oxide.InstanceDeleteParams{Instance: oxide.NameOrId(i.id)}))
	if out, err := exec.CommandContext(t.Context(), "pgrep", "-f", i.qemu()).Output(); err == nil {
		t.Errorf("a machine is left: %s", out)
	}
}

func TestTheMachinesOfATemporaryRackEndWithIt(t *testing.T) {
	image, program := imageDir(t), os.Getenv("OXIDE_SIMULATOR")
	if program == "" {
		program = filepath.Join(t.TempDir(), "oxide-simulator")
		build := exec.CommandContext(t.Context(), "go", "build", "-o", program,
			"../../cmd/oxide-simulator")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatal(err, string(out))
		}
	}
	rack := exec.CommandContext(t.Context(), program, "serve", "--guests=vm", "--vm-image", image,
		"--instance", "a")
	out, err := rack.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := rack.Start(); err != nil {
		t.Fatal(err)
	}
	// It says that it is ready when its machine runs.
	said := bufio.NewScanner(out)
	for said.Scan() && !strings.Contains(said.Text(), "Enter a: ssh -i ") {
	}
	ours := fmt.Sprintf("pgrep -P %d qemu-system", rack.Process.Pid)
	machines, err := exec.CommandContext(t.Context(), "sh", "-c", ours).Output()
	if err != nil {
		t.Fatalf("no machine runs: %v: %s", err, machines)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(machines)))
	if err != nil {
		t.Fatal(err)
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	if err := rack.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	ended := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(ended, 10_000)
	for errors.Is(err, unix.EINTR) { // a signal of the runtime's
		n, err = unix.Poll(ended, 10_000)
	}
	if n != 1 || err != nil {
		t.Errorf("the machine goes on: %v", err)
	}
	_ = rack.Wait() // it was killed
}
