//go:build linux

package concurrency

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

func TestMain(m *testing.M) { proof.Main(m) }
