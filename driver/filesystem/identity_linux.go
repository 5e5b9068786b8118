package filesystem

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// isOf reports whether a filesystem is the volume's own, as far as its UUID tells.
func (sb Superblock) isOf(v Volume) bool {
	return v.FilesystemUUID == "" || sb.UUID.String() == v.FilesystemUUID
}

func (h disk) wrongFilesystem(sb Superblock, want string) error {
	return csierr.New(csierr.WrongFilesystem, "%s with serial %q holds an %s filesystem with the "+
		"UUID %s, but the volume's has the UUID %s; is another disk attached in its place?",
		h.Path, h.Serial,
		sb.Type, sb.UUID, want)
}

// identify sees that what mkfs made has the volume's UUID; none is wanted when it is empty.
func (h disk) identify(made Superblock, want string) (Superblock, error) {
	if made.Type == volume.Btrfs && want != "" {
		return h.nameBtrfs(made, want)
	}
	if want != "" && made.UUID.String() != want {
		return Superblock{}, h.wrongFilesystem(made, want)
	}
	return made, nil
}

// The parts of a btrfs superblock that say which filesystem it is.
const (
	btrfsIncompat     = 0xBC
	btrfsMetadataUUID = 0x23B

	btrfsIncompatMetadataUUID = 0x400
)

// nameBtrfs gives an unmounted btrfs the volume's UUID, as btrfstune -M does: the blocks of its
// trees keep the one that mkfs gave them, which the superblock then names beside the new one. The
// first superblock is written last, for its copies count only when it is lost.
func (h disk) nameBtrfs(sb Superblock, want string) (Superblock, error) {
	id, err := uuid.Parse(want)
	if err != nil || !sb.Checked {
		return sb, h.wrongFilesystem(sb, want)
	}
	err = h.WithExclusive(func(w *os.File) error {
		for _, at := range []int64{256 << 30, 64 << 20, btrfsOffset} {
			if at+btrfsBytes > h.SizeBytes {
				continue
			}
			b, err := h.Read(at, btrfsBytes)
			if err != nil {
				return unreadable(err)
			}
			if !renameBtrfs(b, id) {
				continue
			}
			if err := errors.Join(blockdev.WriteAt(w, b, at), w.Sync()); err != nil {
				return h.unwritable(err)
			}
		}
		return nil
	})
	if err != nil {
		return sb, err
	}
	// The kernel remembers it by the UUID that mkfs announced.
	ForgetBtrfs(h.Path)
	found, err := Find(h.OpenDevice)
	switch {
	case err != nil:
		return sb, err
	case len(found) != 1 || found[0].UUID != id || !found[0].Checked:
		return sb, h.wrongFilesystem(sb, want)
	}
	return found[0], nil
}

// renameBtrfs changes the UUID in a superblock; false means that these bytes are none.
func renameBtrfs(b []byte, id uuid.UUID) bool {
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
