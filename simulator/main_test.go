package simulator

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

func TestMain(m *testing.M) { simtest.Main(m) }
