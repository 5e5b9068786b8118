//go:build linux

package vm_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// instance is an instance whose guest has no driver.
type instance struct {
	*testing.T
	*node
}

func (i instance) await(state oxide.InstanceState) {
	i.Helper()
	must(i.T, harness.Await(i.Context(), bootTime, func() error {
		seen, err := i.rack.Client.InstanceView(i.Context(),
			oxide.InstanceViewParams{Instance: oxide.NameOrId(i.ID)})
		if err == nil && seen.RunState != state {
			err = fmt.Errorf("the instance is %s, not %s", seen.RunState, state)
		}
		return err
	}))
}

// in runs a command in the guest, as soon as the guest's sshd answers.
func (i instance) in(command string) string {
	i.Helper()
	var out []byte
	var failed error
	must(i.T, harness.Await(i.Context(), bootTime, func() error {
		err := i.reach(i.Context())
		if err == nil {
			out, err = i.run(i.Context(), nil, command)
		}
		var ended *exec.ExitError
		if errors.As(err, &ended) && ended.ExitCode() != 255 { // 255: ssh has lost the guest
			failed, err = err, nil
		}
		return err
	}))
	must(i.T, failed)
	return strings.TrimSpace(string(out))
}

// sees() waits until the guest has exactly the NVMe devices with these serials.
func (i instance) sees(serials string) {
	i.Helper()
	got := i.in(fmt.Sprintf(`for try in $(seq 100); do `+
		`seen=$(cat /sys/block/*/device/serial | tr -d " " | sort | xargs); `+
		`[ "$seen" = "%s" ] && break; sleep 0.1; done; echo "$seen"`, serials))
	if got != serials {
		i.Fatalf("the guest sees %q instead of %q", got, serials)
	}
}

func (i instance) console() (string, error) {
	got, err := i.rack.Client.InstanceSerialConsole(i.Context(), oxide.InstanceSerialConsoleParams{
		Instance: oxide.NameOrId(i.ID), MostRecent: oxide.NewPointer(uint64(1 << 16))})
	if err != nil {
		return "", err
	}
	text := make([]byte, len(got.Data))
	for n, b := range got.Data {
		text[n] = byte(b)
	}
	return string(text), nil
}

func (i instance) killQEMU() {
	i.Helper()
	must(i.T, harness.Need(i.qemu())(i.T).Kill())
}

func TestAVirtualMachineKeepsItsDisksWhenTheSimulatorIsKilled(t *testing.T) {
	image := imageDir(t)
	rack := harness.Need(harness.RunFor(t).StartRack(t.Context(), harness.RackOptions{
		Instances: []string{},
		Args:      []string{"--guests=vm", "--vm-image", image, "--keep-devices"}}))(t)
	i := instance{t, &node{rack: rack, key: filepath.Join(t.TempDir(), "key")}}
	t.Cleanup(func() { // the rack leaves its machines running
		i.sever()
		if process, err := i.qemu(); err == nil {
			_ = process.Kill()
		}
		if err := rack.Stop(); err != nil {
			t.Error(err)
		}
	})
	must(t, exec.CommandContext(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
		i.key).Run())
	public := harness.Need(os.ReadFile(i.key + ".pub"))(t)
	harness.Need(rack.Client.CurrentUserSshKeyCreate(t.Context(), oxide.CurrentUserSshKeyCreateParams{
		Body: &oxide.SshKeyCreate{Name: "mine", PublicKey: strings.TrimSpace(string(public))}}))(t)
	const size = 1 << 30
	disk := func(name string) *oxide.Disk {
		return harness.Need(rack.CreateDisk(t.Context(), rack.Project, name, size))(t)
	}
	cold, hot := disk("cold"), disk("hot")

	// The guest accepts the user's key, and has the disk that InstanceCreate attached.
	made := harness.Need(rack.Client.InstanceCreate(t.Context(), oxide.InstanceCreateParams{
		Project: oxide.NameOrId(rack.Project), Body: &oxide.InstanceCreate{Name: "a", Hostname: "a",
			Ncpus: 1, Memory: 1 << 30, Start: oxide.NewPointer(true),
			Disks: []oxide.InstanceDiskAttachment{{Value: &oxide.InstanceDiskAttachmentAttach{
				Name: cold.Name}}}}}))(t)
	i.node.Name, i.ID, i.Guest = "a", made.Id, filepath.Join(rack.Dir, "sim", "guests", made.Id)
	i.await(oxide.InstanceStateRunning)
	i.sees("cold root")
	if name, id := i.in("hostname"), i.in("cat /sys/class/dmi/id/product_serial"); name != "a" ||
		id != i.ID {
		t.Errorf("the guest is %s, its firmware's %s", name, id)
	}

	// The rack attaches and detaches disks of a running guest. A snapshot has what the guest flushed.
	must(t, rack.AttachDisk(t.Context(), hot.Id, i.ID))
	i.sees("cold hot root")
	text := base64.StdEncoding.EncodeToString([]byte(uuid.NewString()))
	i.in(`for d in /sys/block/nvme*n1; do grep -q hot $d/device/serial && ` +
		`echo ` + text + ` | dd of=/dev/$(basename $d) bs=4096 conv=sync,fsync; done`)
	harness.Need(rack.Client.SnapshotCreate(t.Context(), oxide.SnapshotCreateParams{
		Project: oxide.NameOrId(rack.Project),
		Body:    &oxide.SnapshotCreate{Name: "s", Disk: oxide.NameOrId(hot.Id)}}))(t)
	files, err := filepath.Glob(filepath.Join(rack.Dir, "sim", "snapshots", "*.img"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	kept := make([]byte, len(text))
	f := harness.Need(os.Open(files[0]))(t)
	defer f.Close()
	if _, err := f.Read(kept); err != nil || string(kept) != text {
		t.Errorf("the snapshot begins with %q, not with %q: %v", kept, text, err)
	}
	must(t, rack.DetachDisk(t.Context(), hot.Id, i.ID))
	i.sees("cold root")

	// The machine survives when the simulator is killed. The next simulator finds it, with its disks.
	const bootID = "cat /proc/sys/kernel/random/boot_id"
	boot := i.in(bootID)
	rack.Kill()
	dir := filepath.Join(rack.Dir, "sim", "guests", i.ID, "machine")
	found := harness.Need(machine.Find(t.Context(), dir, i.ID))(t)
	must(t, found.Plug(t.Context(), machine.Disk{ID: uuid.NewString(), Serial: "unknown",
		Path: files[0], SizeBytes: size, BlockSize: 512, ReadOnly: true}))
	must(t, errors.Join(found.Pause(t.Context()), found.Release()))
	must(t, rack.Start(t.Context()))
	i.sees("cold root") // without the disk that the records do not have
	if again := i.in(bootID); again != boot {
		t.Errorf("the next simulator finds boot %s, not %s", again, boot)
	}
	if text, err := i.console(); err != nil || !strings.Contains(text, "the guest is up") {
		t.Errorf("the serial console says %q: %v", text, err)
	}
	// The disks also survive a reboot, after which the guest has another boot ID.
	harness.Need(rack.Client.InstanceReboot(t.Context(),
		oxide.InstanceRebootParams{Instance: oxide.NameOrId(i.ID)}))(t)
	for i.in(bootID) == boot { // until the reset, the old kernel answers
	}
	i.sees("cold root")

	// An instance becomes failed if its machine is killed, even if no simulator runs at that time.
	i.killQEMU()
	i.await(oxide.InstanceStateFailed)
	must(t, rack.StartInstance(t.Context(), i.ID))
	rack.Kill()
	i.killQEMU()
	must(t, rack.Start(t.Context()))
	i.await(oxide.InstanceStateFailed)

	// After a boot the guest has its old files, and a disk that was attached while the guest was off.
	must(t, rack.StartInstance(t.Context(), i.ID))
	i.in("touch /kept; sync; poweroff")
	i.await(oxide.InstanceStateStopped)
	if _, err := i.console(); err == nil || !strings.Contains(err.Error(),
		"has no active serial console server") {
		t.Errorf("a stopped instance has a serial console: %v", err)
	}
	must(t, rack.AttachDisk(t.Context(), hot.Id, i.ID))
	must(t, rack.StartInstance(t.Context(), i.ID))
	i.sees("cold hot root")
	i.in("ls /kept")
	must(t, rack.StopInstance(t.Context(), i.ID))
	if address, err := i.sshd(t.Context()); err == nil {
		t.Errorf("a stopped instance has a machine: %s", address)
	}
	must(t, rack.Client.InstanceDelete(t.Context(),
		oxide.InstanceDeleteParams{Instance: oxide.NameOrId(i.ID)}))
	if process, err := i.qemu(); err == nil {
		t.Errorf("a machine is left: %d", process.Pid)
	}
}

func TestVirtualMachinesOfATemporaryRackEndWithTheSimulator(t *testing.T) {
	image := imageDir(t)
	program := harness.Need(harness.RunFor(t).Binary(t.Context(), "oxide-simulator"))(t)
	rack := exec.CommandContext(t.Context(), program, "serve", "--guests=vm", "--vm-image", image,
		"--instance", "a")
	out := harness.Need(rack.StdoutPipe())(t)
	must(t, rack.Start())
	// When the instance's machine runs, the simulator prints how to log in to it.
	said := bufio.NewScanner(out)
	for said.Scan() && !strings.Contains(said.Text(), "Enter a: ssh -i ") {
	}
	ours := fmt.Sprintf("pgrep -P %d qemu-system", rack.Process.Pid)
	machines, err := exec.CommandContext(t.Context(), "sh", "-c", ours).Output()
	if err != nil {
		t.Fatalf("no machine runs: %v: %s", err, machines)
	}
	must(t, rack.Process.Kill())
	program = filepath.Join("/proc", strings.TrimSpace(string(machines)), "exe") // of QEMU
	if err := harness.Await(t.Context(), 10*time.Second, func() error {
		if running, err := os.Readlink(program); err == nil {
			return fmt.Errorf("the machine goes on: %s", running)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	_ = rack.Wait() // it was killed
}

// knownDifferences maps a pattern of disk and attribute to the reason why a guest view and a
// virtual machine show different values.
var knownDifferences = map[string]string{
	"*/device/serial":  "QEMU pads with spaces; the view with NULs, as a rack does",
	"*/device/model":   "QEMU has a model; a rack leaves it empty",
	"readonly/ro":      "QEMU does not say that a namespace is read-only",
	"readonly/node/ro": "as above",
	"root/size":        "a machine's boot disk has the size of its image",
	"root/node/size":   "as above",
}

// reader is a Perl program that prints attributes of the firmware and of each NVMe disk. Instead of
// a dev or diskseq that equals the device node's, it prints "the node's": both change at each boot.
const reader = `use Fcntl ":mode"; my ($sys, $dev, $want, $firmware) = @ARGV;
sub get { my $of = shift; -d $of and return "directory"; open(my $f, "<", $of) or return "missing";
	local $/; my $v = <$f>; my $mode = (stat $f)[2];
	$v =~ s/([^ -~])/sprintf "\\x%02x", ord $1/ge; sprintf "%03o \"%s\"", $mode & 0444, $v }
sub ask { my ($f, $request, $form) = @_; my $v = "\0" x 8;
	ioctl($f, $request, $v) ? unpack($form, $v) : "error $!" }
print "firmware/$_\t", get("$sys/class/dmi/id/$_"), "\n" for split /,/, $firmware;
for my $dir (glob "$sys/block/nvme*n1") {
	my ($name) = $dir =~ m{([^/]+)$}; my $node = "$dev/$name";
	open(my $s, "<", "$dir/device/serial") or die "$dir: $!"; (my $of = <$s>) =~ s/[\0 \n]+$//;
	open(my $f, "<", $node) or die "$node: $!"; my ($mode, $rdev) = (stat $f)[2, 6];
	my $number = sprintf "%d:%d", $rdev >> 8 & 0xfff, $rdev & 0xff | $rdev >> 12 & 0xfff00;
	my $seq = ask($f, 0x80081280, "Q");
	for (split /,/, $want) { my $v = get("$dir/$_");
		if ($_ eq "dev") { $v =~ s/"$number\\x0a"/the node's/ }
		if ($_ eq "diskseq") { $v =~ s/"$seq\\x0a"/the node's/ }
		print "$of/$_\t$v\n" }
	print "$of/node/block\t", S_ISBLK($mode) ? 1 : 0, "\n$of/node/size\t", ask($f, 0x80081272, "Q"),
		"\n$of/node/blocksize\t", ask($f, 0x1268, "L"), "\n$of/node/ro\t", ask($f, 0x125e, "L"), "\n" }`

func TestGuestViewAndVirtualMachineShowTheSameAttributes(t *testing.T) {
	key := hostKey(t)
	p, run := proof.New(t, "guest-view"), harness.RunFor(t)
	start := func(args ...string) instance {
		rack := harness.Need(run.StartRack(t.Context(),
			harness.RackOptions{Instances: []string{"a"}, Args: args}))(t)
		i := instance{t, &node{Instance: rack.Instances[0], rack: rack, key: key}}
		t.Cleanup(func() {
			i.sever()
			ctx := context.WithoutCancel(t.Context()) // the machine outlives the simulator
			if err := errors.Join(rack.StopInstance(ctx, i.ID), rack.Stop()); err != nil {
				t.Error(err)
			}
		})
		return i
	}
	dir := start()
	vm := start("--guests=vm", "--vm-image", imageDir(t))
	dir.attachAll()
	// A machine's boot disk has the serial root, so the guest view gets a disk of this name, too.
	d := harness.Need(dir.rack.CreateDisk(t.Context(), dir.rack.Project, "root", harness.GiB))(t)
	must(t, dir.rack.AttachDisk(t.Context(), d.Id, dir.ID))
	vm.attachAll()
	vm.sees("blocks2048 blocks4096 blocks512 readonly root")

	disk, firmware := dir.attributes()
	wanted := []string{strings.Join(disk, ","), strings.Join(firmware, ",")}
	guest := dir.Guest
	out := harness.Need(exec.CommandContext(t.Context(), "perl", append([]string{"-e", reader,
		filepath.Join(guest, "sys"), filepath.Join(guest, "dev")}, wanted...)...).Output())(t)
	shown := dir.parse(string(out))
	real := vm.parse(vm.in("cat >/tmp/reader <<'END'\n" + reader +
		"\nEND\nperl /tmp/reader /sys /dev " + strings.Join(wanted, " ")))
	var different int
	unseen := maps.Clone(knownDifferences)
	for _, key := range slices.Sorted(maps.Keys(real)) {
		if shown[key] == real[key] {
			continue
		}
		known := false
		for pattern := range knownDifferences {
			if matched, _ := path.Match(pattern, key); matched {
				known = true
				delete(unseen, pattern)
			}
		}
		if !known {
			different++
			t.Errorf("%s is %s in the view, and %s in the machine", key, shown[key], real[key])
		}
	}
	p.Figure("attributes", len(real), "different", different, "known", len(knownDifferences))
	if len(unseen) > 0 || len(shown) != len(real) {
		t.Errorf("of %d attributes and %d, these known differences are not there: %v", len(shown),
			len(real), unseen)
	}
}

func (i instance) attachAll() {
	i.Helper()
	create := func(name string, source oxide.DiskSource) string {
		d := harness.Need(i.rack.Client.DiskCreate(i.Context(), oxide.DiskCreateParams{
			Project: oxide.NameOrId(i.rack.Project), Body: &oxide.DiskCreate{Name: oxide.Name(name),
				Size: oxide.ByteCount(harness.GiB), DiskBackend: oxide.DiskBackend{
					Value: &oxide.DiskBackendDistributed{DiskSource: source}}}}))(i.T)
		must(i.T, i.rack.AttachDisk(i.Context(), d.Id, i.ID))
		return d.Id
	}
	var id string
	for _, size := range []int{512, 2048, 4096} {
		id = create(fmt.Sprintf("blocks%d", size), oxide.DiskSource{
			Value: &oxide.DiskSourceBlank{BlockSize: oxide.BlockSize(size)}})
	}
	s := harness.Need(i.rack.Client.SnapshotCreate(i.Context(), oxide.SnapshotCreateParams{
		Project: oxide.NameOrId(i.rack.Project),
		Body:    &oxide.SnapshotCreate{Name: "s", Disk: oxide.NameOrId(id)}}))(i.T)
	create("readonly", oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: s.Id,
		ReadOnly: oxide.NewPointer(true)}})
}

// attributes returns names from the instance's guest view: those of all files and directories of
// disks, and those of all firmware files.
func (i instance) attributes() (disk, firmware []string) {
	i.Helper()
	of := regexp.MustCompile(`^block/nvme\d+n1/(.+)$|^class/dmi/id/(.+)$`)
	must(i.T, fs.WalkDir(os.DirFS(filepath.Join(i.Guest, "sys")), ".",
		func(name string, _ fs.DirEntry, err error) error {
			if m := of.FindStringSubmatch(name); m != nil && m[1] != "" {
				disk = append(disk, m[1])
			} else if m != nil {
				firmware = append(firmware, m[2])
			}
			return err
		}))
	slices.Sort(disk)
	return slices.Compact(disk), firmware
}

func (i instance) parse(out string) map[string]string {
	of := map[string]string{}
	for line := range strings.Lines(strings.ReplaceAll(out, i.ID, "ID")) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		of[key] = value
	}
	return of
}
