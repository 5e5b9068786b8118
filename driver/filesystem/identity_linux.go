package filesystem

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// isOf reports whether a filesystem has the UUID of the volume's own, if that is known.
func (sb Superblock) isOf(v Volume) bool {
	return v.FilesystemUUID == "" || sb.UUID.String() == v.FilesystemUUID
}

func (d disk) wrongFilesystem(sb Superblock, want string) error {
	return csierr.New(csierr.WrongFilesystem, "%s with serial %q holds an %s filesystem with the "+
		"UUID %s, but the volume's has the UUID %s; is another disk attached in its place?",
		d.Path, d.Serial, sb.Type, sb.UUID, want)
}

// identify makes sure that the new filesystem can be mounted and has the features and the UUID of
// the volume's. An empty UUID matches any.
func (d disk) identify(made Superblock, v Volume) (Superblock, error) {
	if err := d.allow(made); err != nil {
		return Superblock{}, err
	}
	if err := d.checkNewFeatures(made, v); err != nil {
		return Superblock{}, err
	}
	want := v.makeUUID()
	if made.Type == volume.Btrfs && want != "" {
		return d.setBtrfsUUID(made, want)
	}
	if want != "" && made.UUID.String() != want {
		return Superblock{}, d.wrongFilesystem(made, want)
	}
	return made, nil
}

// checkNewFeatures returns an error unless a new filesystem has the features that it must have.
func (d disk) checkNewFeatures(made Superblock, v Volume) error {
	if got, want := made.chosenFeatures(), v.newFeatures(); !slices.Equal(got, want) {
		return csierr.New(csierr.NodeToolFailed, "the new %s filesystem on %s has the features %s, but "+
			"the driver asked for %s; give the node a version of the mkfs program that makes these, and "+
			"if this error stays, make the volume anew",
			made.Type, d.Path, strings.Join(got, " "), strings.Join(want, " "))
	}
	return nil
}

// setBtrfsUUID gives an unmounted btrfs the volume's UUID, as btrfstune -M does: the tree blocks
// keep the UUID that mkfs gave them, and the superblock then names both. The first superblock is
// written last, because its copies are used only if it is lost.
func (d disk) setBtrfsUUID(sb Superblock, want string) (Superblock, error) {
	id, err := uuid.Parse(want)
	if err != nil || !sb.ChecksumOK {
		return sb, d.wrongFilesystem(sb, want)
	}
	err = d.WithExclusive(func(w *os.File) error {
		for _, at := range []int64{256 << 30, 64 << 20, btrfsOffset} {
			if at+btrfsBytes > d.SizeBytes {
				continue
			}
			b, err := d.Read(at, btrfsBytes)
			if err != nil {
				return unreadable(err)
			}
			if !changeBtrfsUUID(b, id) {
				continue
			}
			if err := errors.Join(blockdev.WriteAt(w, b, at), w.Sync()); err != nil {
				return d.unwritable(err)
			}
		}
		return nil
	})
	if err != nil {
		return sb, err
	}
	found, err := Find(d.OpenDevice)
	switch {
	case err != nil:
		return sb, err
	case len(found) != 1 || found[0].UUID != id || !found[0].ChecksumOK:
		return sb, d.wrongFilesystem(sb, want)
	}
	return found[0], nil
}

// changeBtrfsUUID changes the UUID in a superblock. It returns false if b is not a superblock.
func changeBtrfsUUID(b []byte, id uuid.UUID) bool {
	if string(b[0x40:0x48]) != "_BHRfS_M" {
		return false
	}
	le := binary.LittleEndian
	incompat := le.Uint64(b[btrfsIncompat:])
	if incompat&btrfsIncompatMetadataUUID == 0 {
		copy(b[btrfsMetadataUUID:], b[btrfsFSID:btrfsFSID+16])
		le.PutUint64(b[btrfsIncompat:], incompat|btrfsIncompatMetadataUUID)
	}
	copy(b[btrfsFSID:], id[:])
	le.PutUint32(b, crc32.Checksum(b[0x20:], castagnoli))
	return true
}
