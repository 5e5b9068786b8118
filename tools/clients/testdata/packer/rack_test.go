package instance

import (
	"context"
	"os"
	"testing"

	"github.com/hashicorp/packer-plugin-sdk/communicator"
	"github.com/hashicorp/packer-plugin-sdk/multistep"
	"github.com/hashicorp/packer-plugin-sdk/packer"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// TestPackerBuildStepsSucceedOnARack runs the steps of a build in order. It omits steps that
// connect to a guest, because the simulated rack runs no guests.
func TestPackerBuildStepsSucceedOnARack(t *testing.T) {
	client, err := oxide.NewClient()
	if err != nil {
		t.Fatal(err)
	}
	config := &Config{}
	if _, err := config.Prepare(map[string]any{
		"project":             os.Getenv("OXIDE_PROJECT"),
		"boot_disk_image_id":  os.Getenv("RACK_IMAGE_ID"),
		"artifact_name":       "made-by-packer",
		"communicator":        "none",
		"packer_build_name":   "rack",
		"packer_builder_type": "oxide-instance",
	}); err != nil {
		t.Fatal(err)
	}
	state := &multistep.BasicStateBag{}
	state.Put("client", client)
	state.Put("config", config)
	state.Put("ui", packer.TestUi(t))

	key := &communicator.StepSSHKeyGen{
		CommConf: &config.Comm, SSHTemporaryKeyPair: config.Comm.SSHTemporaryKeyPair,
	}
	if key.Run(t.Context(), state) != multistep.ActionContinue {
		t.Fatal("no SSH key was made")
	}
	steps := []multistep.Step{
		&stepImageView{}, &stepArtifactValidate{}, &stepSSHKeyCreate{}, &stepInstanceCreate{},
		&stepInstanceExternalIPList{}, &stepInstanceStop{}, &stepSnapshotCreate{}, &stepImageCreate{},
	}
	done := 0
	for _, step := range steps {
		defer step.Cleanup(state)
		if step.Run(context.Background(), state) != multistep.ActionContinue {
			t.Errorf("%T: %v", step, state.Get("error"))
			break
		}
		done++
	}
	t.Logf("STEPS %d of %d", done, len(steps))
}
