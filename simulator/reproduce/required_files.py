"""Which files a setting's records are read from, under the folder that a person names, and what is not there."""

from ...algorithms.data.registry import Source, place
from ...algorithms.data.sources.images import Images
from ...algorithms.data.sources.tiny_imagenet import TinyImageNet
from ...algorithms.data.sources.torchvision_sets import SETS, Torchvision
from ..experiment.assign import title
from ..experiment.options import Data, Partition, PartitionFromFile, Synthetic


def called(data: Data) -> str:
    """What a data set is called."""
    return "synthetic" if isinstance(data, Synthetic) else _called(data)


def missing(data: Data, partition: Partition | None) -> tuple[str, ...]:
    """What is not there, each with what belongs where; whether what is there can be read shows when it is."""
    found = [] if isinstance(data, Synthetic) or _there(data) else [f"{_called(data)}: {_wanted(data)}"]
    if isinstance(partition, PartitionFromFile) and not partition.file.is_file():
        found.append(f"partition: {partition.file}")
    return tuple(found)


def _called(source: Source) -> str:
    if isinstance(source, Torchvision) and source.split is not None:
        return f"{source.name} {source.split}"
    return title(source)


def _there(source: Source) -> bool:
    match source:
        case Torchvision():
            signs = (sign.replace("SPLIT", source.split or "") for sign in SETS[source.name].signs)
            return any((source.folder / sign).exists() for sign in signs)
        case Images(domains=tuple(domains)):
            return all((source.folder / domain).is_dir() for domain in domains)
        case TinyImageNet():
            return (source.folder / "wnids.txt").is_file()
        case _:
            at = place(source)
            return at is None or at.exists()


def _wanted(source: Source) -> str:
    match source:
        case Torchvision():
            return f"{source.folder}/{SETS[source.name].files.replace('SPLIT', source.split or '')}"
        case Images(domains=tuple(domains)):
            return f"{source.folder}/{{{','.join(domains)}}}/CLASS/*.png"
        case Images():
            return f"{source.folder}/CLASS/*.png"
        case TinyImageNet():
            return f"{source.folder}/{{wnids.txt,train,val}}, as tiny-imagenet-200.zip has it"
        case _:
            return str(place(source))
