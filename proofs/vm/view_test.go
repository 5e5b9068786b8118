//go:build linux

package vm_test

import (
	"context"
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

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// knownDifferences are those between a guest's view and a virtual machine, by patterns of the disk
// and its attribute, with the reason.
var knownDifferences = map[string]string{
	"*/device/serial":  "QEMU pads with spaces; the view with NULs, as a rack does",
	"*/device/model":   "QEMU has a model; a rack leaves it empty",
	"readonly/ro":      "QEMU does not say that a namespace is read-only",
	"readonly/node/ro": "as above",
	"root/size":        "a machine's boot disk has the size of its image",
	"root/node/size":   "as above",
}

// reader prints attributes of each NVMe disk below a sysfs and a device directory, and of the
// firmware. Numbers that differ from boot to boot it compares with those of the device's node.
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

// TestGuestViewShowsWhatAMachineShows compares the view of a guest that is a directory with a
// virtual machine that has the same disks.
func TestGuestViewShowsWhatAMachineShows(t *testing.T) {
	key := hostKey(t)
	p, run := proof.New(t, "guest-view"), harness.RunFor(t)
	start := func(args ...string) instance {
		rack, err := run.StartRack(t.Context(), harness.RackOptions{Instances: []string{"a"}, Args: args})
		if err != nil {
			t.Fatal(err)
		}
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
	// A machine has a boot disk of its own, whose serial number this is.
	d, err := dir.rack.CreateDisk(t.Context(), dir.rack.Project, "root", harness.GiB)
	dir.must(err)
	dir.must(dir.rack.AttachDisk(t.Context(), d.Id, dir.ID))
	vm.attachAll()
	vm.sees("blocks2048 blocks4096 blocks512 readonly root")

	disk, firmware := dir.attributes()
	wanted := []string{strings.Join(disk, ","), strings.Join(firmware, ",")}
	guest := dir.Guest
	out, err := exec.CommandContext(t.Context(), "perl", append([]string{"-e", reader,
		filepath.Join(guest, "sys"), filepath.Join(guest, "dev")}, wanted...)...).Output()
	dir.must(err)
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

// attachAll attaches a disk of each block size, and one that is read-only.
func (i instance) attachAll() {
	i.Helper()
	create := func(name string, source oxide.DiskSource) string {
		d, err := i.rack.Client.DiskCreate(i.Context(), oxide.DiskCreateParams{
			Project: oxide.NameOrId(i.rack.Project), Body: &oxide.DiskCreate{Name: oxide.Name(name),
				Size: oxide.ByteCount(harness.GiB), DiskBackend: oxide.DiskBackend{
					Value: &oxide.DiskBackendDistributed{DiskSource: source}}}})
		i.must(err)
		i.must(i.rack.AttachDisk(i.Context(), d.Id, i.ID))
		return d.Id
	}
	var id string
	for _, size := range []int{512, 2048, 4096} {
		id = create(fmt.Sprintf("blocks%d", size), oxide.DiskSource{
			Value: &oxide.DiskSourceBlank{BlockSize: oxide.BlockSize(size)}})
	}
	s, err := i.rack.Client.SnapshotCreate(i.Context(), oxide.SnapshotCreateParams{
		Project: oxide.NameOrId(i.rack.Project),
		Body:    &oxide.SnapshotCreate{Name: "s", Disk: oxide.NameOrId(id)}})
	i.must(err)
	create("readonly", oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: s.Id,
		ReadOnly: oxide.NewPointer(true)}})
}

// attributes returns the files and directories of the disks, and those of the firmware, that the
// view of the instance has.
func (i instance) attributes() (disk, firmware []string) {
	i.Helper()
	of := regexp.MustCompile(`^block/nvme\d+n1/(.+)$|^class/dmi/id/(.+)$`)
	i.must(fs.WalkDir(os.DirFS(filepath.Join(i.Guest, "sys")), ".",
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

// parse parses what the reader prints of the instance.
func (i instance) parse(out string) map[string]string {
	of := map[string]string{}
	for line := range strings.Lines(strings.ReplaceAll(out, i.ID, "ID")) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		of[key] = value
	}
	return of
}
