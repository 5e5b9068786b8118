package engine

import (
	"encoding/base64"
	"fmt"
	"strings"
	"unicode"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// BulkWrite is a part of the bytes that are imported into a disk.
type BulkWrite struct {
	Offset uint64
	Base64 string
}

// maxChunk is the most that the rack writes at once (A90).
const maxChunk = 512 << 10

// StartImport lets a disk receive bytes (A90).
func (s Disks) StartImport(call *Call, ref Ref) error {
	return s.moveImport(call, ref, store.StateImportReady, store.StateImporting)
}

// StopImport ends the writes into a disk (A90).
func (s Disks) StopImport(call *Call, ref Ref) error {
	return s.moveImport(call, ref, store.StateImporting, store.StateImportReady)
}

// moveImport changes the state of a disk when no write to it is in progress, and makes the writes
// durable.
func (s Disks) moveImport(call *Call, ref Ref, from, to string) error {
	d, err := s.importing(call, ref)
	if err != nil {
		return err
	}
	defer s.locks.Lock(d.ID)()
	if err := s.plane.FlushDisk(d.ID); err != nil {
		return err
	}
	return s.store.Update(func(tx *store.Tx) {
		moveState(tx, d.ID, from, to, fmt.Sprintf("cannot set disk in state %%s to %q", to))
	})
}

// importing finds the disk of an import. For a local disk the rack answers 500 (A90).
func (s Disks) importing(call *Call, ref Ref) (store.Disk, error) {
	d, err := s.View(call, ref)
	if err == nil && d.DiskType == store.TypeLocal {
		err = errInternal
	}
	return d, err
}

// moveState changes the state of a disk, or refuses to if the disk is not in the state from.
func moveState(tx *store.Tx, id, from, to, refusal string) {
	d := byID(tx, store.Disks, id)
	if d.State.State != from {
		tx.Check(invalidRequest(refusal, debugState(d.State)))
	}
	d.State.State = to
	tx.PutDisk(d)
}

// debugState returns a state as the rack's log shows it: ImportReady, Attached(<instance>).
func debugState(state store.DiskState) string {
	var text strings.Builder
	for word := range strings.SplitSeq(state.State, "_") {
		text.WriteString(strings.ToUpper(word[:1]) + word[1:])
	}
	if state.Instance != "" {
		text.WriteString("(" + state.Instance + ")")
	}
	return text.String()
}

// Import writes a part of the imported bytes into a disk. The lock orders it with a stop of the
// import, so that no write follows the stop.
func (s Disks) Import(call *Call, ref Ref, w BulkWrite) error {
	d, err := s.importing(call, ref)
	if err != nil {
		return err
	}
	defer s.locks.Lock(d.ID)()
	d, err = reading(s.Simulation, func(tx *store.Tx) store.Disk { return byID(tx, store.Disks, d.ID) })
	if err != nil {
		return err
	}
	if d.State.State != store.StateImporting {
		return invalidRequest("cannot import blocks with a bulk write for disk in state %s",
			debugState(d.State))
	}
	data, err := decodeBase64(w.Base64)
	if err != nil {
		return err
	}
	if err := checkChunk(d, w.Offset, len(data)); err != nil || len(data) == 0 {
		return err
	}
	// A90: bytes behind the disk's end are dropped.
	data = data[:min(int64(len(data)), d.Size-int64(w.Offset))]
	return s.plane.WriteDisk(d.ID, int64(w.Offset), data)
}

// checkChunk makes the checks of the rack's pantry, in its order (A90).
func checkChunk(d store.Disk, offset uint64, length int) error {
	switch {
	case length > maxChunk:
		return invalidRequest("Invalid number of blocks: data len %d over max chunk size %d!",
			length, maxChunk)
	case offset%uint64(d.BlockSize) != 0:
		return invalidRequest("Offset not block aligned")
	case length%d.BlockSize != 0:
		return invalidRequest("Data length not block size multiple")
	case length > 0 && offset >= uint64(d.Size):
		return invalidRequest("Offset past end of extent")
	}
	return nil
}

// decodeBase64 decodes the bytes of a write, or returns the error of the rack's decoder.
func decodeBase64(text string) ([]byte, error) {
	const refusal = "error base64 decoding data: "
	symbols := strings.TrimRight(text, "=")
	at := strings.IndexFunc(symbols, func(c rune) bool {
		return c > unicode.MaxASCII || !unicode.IsLetter(c) && !unicode.IsDigit(c) &&
			c != '+' && c != '/'
	})
	if at >= 0 {
		return nil, invalidRequest(refusal+"Invalid symbol %d, offset %d.", symbols[at], at)
	}
	data, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil {
		return nil, invalidRequest(refusal + "Invalid padding")
	}
	return data, nil
}

// Finalize makes an imported disk usable, and takes a snapshot of it unless the name is "". In the
// meantime other callers see the disk in the state finalizing. If the snapshot fails, the disk is
// import_ready again (A90).
func (s Disks) Finalize(call *Call, ref Ref, snapshot string) error {
	const refusal = "cannot finalize disk in state DiskState(%s)"
	d, err := s.importing(call, ref)
	switch {
	case err != nil:
		return err
	case d.ReadOnly && snapshot != "":
		return invalidRequest("cannot snapshot read-only disk %s!", d.ID)
	case d.State.State != store.StateImportReady:
		return invalidRequest(refusal, debugState(d.State))
	case snapshot == "":
		return s.store.Update(func(tx *store.Tx) {
			failHalfway(call, tx)
			moveState(tx, d.ID, store.StateImportReady, store.StateDetached, refusal)
		})
	}
	_, err = s.Snapshots.take(call, d, store.NewIdentity(uuid.NewString(), snapshot,
		"snapshot of finalized disk "+d.ID), func(tx *store.Tx) {
		moveState(tx, d.ID, store.StateImportReady, store.StateFinalizing, refusal)
	})
	call.Object = d.Identity
	return err
}
