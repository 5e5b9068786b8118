//go:build linux

package corpus_test

import (
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// made is the history that the controller reports for a disk that the driver has created blank, for
// filesystems only. With any other history, the driver reads the whole disk.
var made = map[string]string{"origin": "blank", "use": "filesystem"}

// histories contains, by the name of such a disk, the histories for which the driver must read the
// whole disk to prove that it is blank.
var histories = map[string]map[string]string{
	"that the driver did not make": nil,
	"restored from a snapshot":     {"origin": "snapshot", "use": "filesystem"},
	"from an image":                {"origin": "image", "use": "filesystem"},
	"that is also for raw use":     {"origin": "blank", "use": "both"},
}

// grown returns disks with histories that do not exclude data anywhere on the disk.
func grown() []generator {
	var all []generator
	for _, name := range slices.Sorted(maps.Keys(histories)) {
		add := func(n int, what string, make func(*trial)) {
			all = append(all, each(n, what+" "+name, func(t *trial) {
				t.History = histories[name]
				make(t)
			})...)
		}
		anyOf := func(t *trial) { t.FS, t.Want = ours[t.Rand.IntN(len(ours))], isFormatted }
		add(3, "data of a sector anywhere on a disk", func(t *trial) { t.anywhere(512) })
		// Small and large pieces have the same frequency.
		add(3, "data of any length anywhere on a disk", func(t *trial) {
			t.anywhere(512 << t.Rand.IntN(22))
		})
		add(1, "one byte in the middle of a disk", func(t *trial) {
			fillByte(t, t.Size/4+t.Rand.Int64N(t.Size/2))
		})
		add(1, "a blank disk", anyOf)
		add(1, "an own format on a disk", func(t *trial) {
			anyOf(t)
			t.Set, t.Check = (*fixture).someOfIt, (*fixture).markGone
		})
		add(1, "data anywhere, under an own mark, on a disk", func(t *trial) {
			b, at := randomBytes(t.Rand, 512), t.Rand.Int64N(t.Size/512)*512
			t.Set = func(f *fixture) {
				f.formatted()
				f.poke(at, b...)
			}
			t.Want = foreign()
		})
	}
	return append(all, uses()...)
}

// anywhere writes up to n bytes at a random place.
func (t *trial) anywhere(n int64) {
	n = min(n, t.Size/2)
	at := t.Rand.Int64N((t.Size-n)/512) * 512
	b := randomBytes(t.Rand, min(n, mib))
	t.Fill = func(im *image) {
		for done := int64(0); done < n; done += int64(len(b)) {
			im.write(at+done, b[:min(int64(len(b)), n-done)]...)
		}
	}
	t.Want = foreign()
}

// uses returns disks that differ from the controller's report, or that other programs use.
func uses() []generator {
	locked := refuse("DeviceLocked")
	locked.Code = "Aborted"
	writing := func(f *fixture) { f.open(os.O_RDWR) }
	blocks := func(f *fixture) { f.Publish["blockSize"] = fmt.Sprint(f.BlockSize * 8) }
	return []generator{
		situation("a blank disk that a program has open for writing", refuse(held), writing),
		onHealthy("a healthy disk that a program has open for writing", refuse(held), writing),
		situation("a blank disk that another driver has locked", locked, (*fixture).lock),
		onHealthy("a healthy disk that another driver works on", locked, (*fixture).lock),
		situation("a blank disk with blocks of another size", refuse("DeviceDiffers"), blocks),
		onHealthy("a healthy disk with blocks of another size", refuse("DeviceDiffers"), blocks),
		situation("a blank disk for raw use", refuse("UseDiffers"), func(f *fixture) {
			f.Publish["use"] = "block"
		}),
		blank("boot code over an own format", ext4, foreign(), func(f *fixture) {
			f.formatted()
			f.poke(0, slices.Repeat([]byte{0xEB}, 440)...)
		}),
	}
}

// lock locks the disk as a driver does that works on it.
func (f *fixture) lock() { f.atEnd(harness.Got(f.bench.Plugin.LockVolumes()).Close) }
