//go:build !linux

package node

import (
	"errors"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
)

// Inspect reports that it needs Linux.
func (n *Service) Inspect([]inspection.Asked) inspection.Report {
	const why = "the node service needs Linux"
	return inspection.Report{Format: inspection.Format, Unseen: []inspection.Unseen{
		{Part: inspection.PartDevices, Why: why}, {Part: inspection.PartMounts, Why: why}}}
}

// Use returns an error, because it needs Linux.
func (n *Service) Use() (Use, error) { return Use{}, errors.New("the node service needs Linux") }
